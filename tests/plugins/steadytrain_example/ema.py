"""The exponential moving average of the weights, validated and exported in their place."""

from steadytrain.components.techniques.base import (
    TrainingComponent,
    TrainingContext,
    Update,
)


class Ema(TrainingComponent):
    """Averages the weights after each update.

    Args:
        decay: share of the old average in the new one.
    """

    exports = "average"
    weight_copies = 1

    def __init__(self, *, decay: float = 0.999) -> None:
        if not 0 < decay < 1:
            raise ValueError(f"decay is {decay}; it must be between 0 and 1")
        self.decay = decay

    def begin(self, context: TrainingContext) -> None:
        self.weights = context.weights
        self.average = {name: weight.clone() for name, weight in context.weights.items()}

    def after_update(self, update: Update) -> None:
        for name, average in self.average.items():
            average.lerp_(self.weights[name], 1 - self.decay)

    def tensors(self):
        return {"average": self.average}
