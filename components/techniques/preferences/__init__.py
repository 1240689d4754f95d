"""Learning from preferences, in pairs or one by one: the settings."""

from __future__ import annotations

from pydantic import Field, model_validator

from steadytrain.components.shared.effects import at_odds
from steadytrain.components.techniques.settings import ObjectiveConfig


class DpoConfig(ObjectiveConfig):
    """Learning which of two answers is preferred (Rafailov et al. 2023, DPO)."""

    beta: float = Field(
        0.1,
        gt=0,
        description="Strength of the tie to the reference model, which is model.base: a lower one "
        "lets the model move further away from it. Only data.task preference reads it.",
    )


class KtoConfig(ObjectiveConfig):
    """Learning from answers that are good or bad (Ethayarajh et al. 2024, KTO)."""

    beta: float = Field(
        0.1,
        gt=0,
        description="Strength of the tie to the reference model, which is model.base: a lower one "
        "lets the model move further away from it. Only data.task unpaired_preference reads it.",
    )
    desirable_weight: float = Field(
        1.0,
        ge=0,
        description="Weight of the loss of good answers. With fewer good answers than bad ones, "
        "raise it until both sides weigh about the same. Only data.task unpaired_preference reads "
        "it.",
    )
    undesirable_weight: float = Field(
        1.0,
        ge=0,
        description="Weight of the loss of bad answers. Only data.task unpaired_preference reads "
        "it.",
    )

    @property
    def weights(self) -> tuple[float, float]:
        """The weights of good answers and of bad ones."""
        return self.desirable_weight, self.undesirable_weight

    @model_validator(mode="after")
    def _learns_something(self) -> KtoConfig:
        if not self.desirable_weight and not self.undesirable_weight:
            raise at_odds(
                "training.kto.undesirable_weight",
                0.0,
                "training.kto.desirable_weight is 0 too, so nothing is learned",
                "raise one of them",
            )
        return self
