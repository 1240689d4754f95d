"""A monitor: the norm of the gradients at every step, next to the validations."""

import json
from collections.abc import Mapping
from typing import Any

from steadytrain.components.techniques.base import (
    TrainingComponent,
    TrainingContext,
    Update,
)


class GradNorms(TrainingComponent):
    """Keeps the gradient norms, and writes them to a file in the run's folder at validations."""

    def begin(self, context: TrainingContext) -> None:
        self.file = context.folder / "grad-norms.json" if context.rank == 0 else None
        self.norms: list[float] = []

    def after_update(self, update: Update) -> None:
        self.norms.append(update.grad_norm)

    def after_validation(self, metrics: Mapping[str, float]) -> None:
        if self.file is not None:
            self.file.write_text(json.dumps({"norms": self.norms, "metrics": metrics}))

    def state_dict(self) -> Mapping[str, Any]:
        return {"norms": self.norms}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.norms = list(state["norms"])
