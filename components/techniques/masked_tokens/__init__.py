"""Predicting hidden tokens: the settings."""

from __future__ import annotations

from pydantic import Field

from steadytrain.components.techniques.settings import ObjectiveConfig


class MaskingConfig(ObjectiveConfig):
    """Predicting hidden tokens (Devlin et al. 2019, BERT)."""

    probability: float = Field(
        0.15,
        gt=0,
        lt=1,
        description="Probability that a token is predicted. Of those, 80 % are hidden, 10 % become "
        "another token, and 10 % stay. Only data.task masked_lm reads it.",
    )
