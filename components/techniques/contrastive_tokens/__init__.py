"""The contrastive loss of token states: the settings."""

from __future__ import annotations

from typing import Final

from pydantic import Field, model_validator

from steadytrain.components.techniques.settings import ObjectiveConfig, Rule


class ContrastiveConfig(ObjectiveConfig):
    """Pushing the token states of a document apart (Su et al. 2022, SimCTG)."""

    weight: float = Field(
        0.0,
        ge=0,
        description="Weight of the contrastive loss, which is added to the loss on the targets. "
        "The paper uses 1. 0 turns it off.",
    )
    margin: float = Field(
        0.5,
        gt=0,
        le=2,
        description="Distance (1 minus cosine similarity) above which two states of a document "
        "cost nothing.",
    )
    temperature: float = Field(
        0.0,
        ge=0,
        description="Width over which the loss bends at the margin (softplus instead of the "
        "hinge). 0 means the hinge of the paper.",
    )

    @property
    def on(self) -> bool:
        return self.weight > 0

    @model_validator(mode="after")
    def _is_read(self) -> ContrastiveConfig:
        self._check_off("contrastive", "weight")
        return self


RULES: Final = (
    Rule(
        "training.contrastive",
        "training.r_drop",
        "it compares the rows of one pass, and R-Drop has two",
    ),
)
