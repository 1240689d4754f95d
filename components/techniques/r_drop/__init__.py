"""Two forward passes that should agree: the settings."""

from __future__ import annotations

from typing import Final

from pydantic import Field

from steadytrain.components.techniques.settings import ObjectiveConfig, Rule


class RDropConfig(ObjectiveConfig):
    """Making two forward passes with different dropout agree (Liang et al. 2021, R-Drop)."""

    weight: float = Field(
        0.0,
        ge=0,
        description="Weight of the symmetric divergence of the two passes: the paper's alpha. The "
        "paper uses 1 to 5. 0 turns it off.",
    )


RULES: Final = (
    Rule("training.r_drop", "training.adversarial", "both passes would need the same perturbation"),
)
