"""What is measured while a model trains, such as the gradient noise scale: the settings."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from pydantic import Field

from steadytrain.components.shared.effects import at_odds
from steadytrain.components.techniques.settings import Recipe, Rule, TechniqueConfig


class MonitorConfig(TechniqueConfig):
    """What is measured in addition while the model trains. It does not change the weights."""

    layers: bool = Field(
        False,
        description="Measure the norms of gradients, weights and updates of each layer, and "
        "diagnose the learning rate and the gradients by layer.",
    )
    histograms: bool = Field(
        False,
        description="Count the weights and the gradients of each layer by their values, for "
        "TensorBoard, Weights & Biases, the report and `steadytrain ui`.",
    )
    noise_scale: bool = Field(
        False,
        description="Estimate the gradient noise scale, and from it the critical batch size: up to "
        "about this size, a larger global batch saves steps. Needs at least two micro-batches per "
        "global batch. With one rank or DDP only.",
    )
    every_steps: int = Field(10, ge=1, description="Optimizer steps between two such measurements.")

    @property
    def on(self) -> bool:
        return self.layers or self.histograms or self.noise_scale

    def features(self) -> Iterator[tuple[str, str, str]]:
        for name in ("layers", "histograms", "noise_scale"):
            if getattr(self, name):
                yield f"training.monitor.{name}", f"training.monitor.{name}", "true"

    def check(self, recipe: Recipe) -> None:
        if self.noise_scale and recipe.global_batch_size < 2:
            raise at_odds(
                "training.monitor.noise_scale",
                True,
                "it compares the gradients of at least two micro-batches, and "
                f"training.global_batch_size is {recipe.global_batch_size}",
                "raise training.global_batch_size to at least 2, or set it to false",
            )


RULES: Final = (
    Rule(
        "training.monitor.noise_scale",
        "training.mixup",
        "it needs independent micro-batches, and mixtures share texts",
    ),
)
