"""Counting hard targets more: the settings."""

from __future__ import annotations

from pydantic import Field

from steadytrain.components.techniques.settings import ObjectiveConfig


class FocalLossConfig(ObjectiveConfig):
    """Counting targets less that the model already predicts well (Lin et al. 2017)."""

    gamma: float = Field(
        0.0,
        ge=0,
        description="The loss of each target is multiplied by (1 - probability) to this power. The "
        "paper uses 2. 0 turns it off.",
    )
