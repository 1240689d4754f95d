"""Random changes of training texts: the settings."""

from __future__ import annotations

from typing import Final

from pydantic import Field, model_validator

from steadytrain.components.shared.effects import check_unread
from steadytrain.components.techniques.settings import ObjectiveConfig, Rule


class AugmentationConfig(ObjectiveConfig):
    """Random changes of training texts (Wei and Zou 2019, EDA). Validation texts never change."""

    deletion: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="Random deletion: share of the words that are left out. EDA uses 0.05 to 0.1. "
        "0 turns it off.",
    )
    swap: float = Field(
        0.0,
        ge=0,
        le=1,
        description="Random swap: exchanges of two random words, as a share of the words. EDA uses "
        "0.05 to 0.1. 0 turns it off.",
    )
    character_noise: float = Field(
        0.0,
        ge=0,
        le=1,
        description="Share of the characters that get a typing error: left out, replaced, or "
        "swapped with the next one (Belinkov and Bisk 2018). 0 turns it off.",
    )
    probability: float = Field(
        0.8,
        gt=0,
        le=1,
        description="Probability that a text is changed when it is drawn, by one of the operations "
        "above that are on, at random. 0.8 corresponds to EDA's four changed copies of each text.",
    )

    @property
    def operations(self) -> dict[str, float]:
        """The operations that are on, each with its share."""
        shares = self.model_dump(exclude={"probability"})
        return {name: share for name, share in shares.items() if share > 0}

    @property
    def on(self) -> bool:
        return bool(self.operations)

    @model_validator(mode="after")
    def _is_read(self) -> AugmentationConfig:
        if not self.on:
            fix = "set deletion, swap or character_noise"
            check_unread(
                self, "training.augmentation", ("probability",), "without an operation", fix
            )
        return self


RULES: Final = (Rule("training.augmentation", "data.columns.text_pair", "it changes single texts"),)
