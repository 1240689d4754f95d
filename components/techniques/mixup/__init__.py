"""Mixtures of two texts: the settings."""

from __future__ import annotations

from typing import Final

from pydantic import Field

from steadytrain.components.shared.section import at_odds
from steadytrain.components.techniques.settings import ObjectiveConfig, Recipe, Rule


class MixupConfig(ObjectiveConfig):
    """Mixing the token embeddings and labels of two texts (Guo et al. 2019, wordMixup)."""

    alpha: float = Field(
        0.0,
        ge=0,
        description="The share of each text in its mixture is drawn from Beta(alpha, alpha): 1 "
        "draws all shares equally often, a smaller value keeps most mixtures close to one text. 0 "
        "turns it off.",
    )

    @property
    def on(self) -> bool:
        return self.alpha > 0

    def check(self, recipe: Recipe) -> None:
        if self.on and recipe.global_batch_size < 2:
            raise at_odds(
                "training.mixup.alpha",
                self.alpha,
                "it mixes the texts of a global batch, and training.global_batch_size is "
                f"{recipe.global_batch_size}",
                "raise training.global_batch_size to at least 2, or leave it out",
            )


RULES: Final = (
    Rule(
        "training.mixup",
        "data.columns.text_pair",
        "a mixture of two pairs has no first and second text",
    ),
)
