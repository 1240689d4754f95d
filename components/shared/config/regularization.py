"""Regularization by the loss: two dropout passes, hard examples, rare classes."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from steadytrain.components.shared.config.base import at_odds
from steadytrain.components.shared.config.objective import ObjectiveConfig


class RDropConfig(ObjectiveConfig):
    """Making two forward passes with different dropout agree (Liang et al. 2021, R-Drop)."""

    weight: float = Field(
        0.0,
        ge=0,
        description="Weight of the symmetric divergence of the two passes: the paper's alpha. The "
        "paper uses 1 to 5. 0 turns it off.",
    )

    @property
    def on(self) -> bool:
        return self.weight > 0


class FocalLossConfig(ObjectiveConfig):
    """Counting targets less that the model already predicts well (Lin et al. 2017)."""

    gamma: float = Field(
        0.0,
        ge=0,
        description="The loss of each target is multiplied by (1 - probability) to this power. The "
        "paper uses 2. 0 turns it off.",
    )

    @property
    def on(self) -> bool:
        return self.gamma > 0


class ClassWeightsConfig(ObjectiveConfig):
    """Counting the examples of some classes more than those of others."""

    kind: Literal["none", "balanced", "given"] = Field(
        "none",
        description="none; balanced: in inverse proportion to the number of training examples of "
        "the class, 1 on average, as in scikit-learn; or given: the weights in `given`.",
    )
    given: dict[str, Annotated[float, Field(gt=0)]] = Field(
        {}, description="Weight of each label. Only for given."
    )

    @property
    def on(self) -> bool:
        return self.kind != "none"

    @model_validator(mode="after")
    def _is_read(self) -> ClassWeightsConfig:
        if (self.kind == "given") != bool(self.given):
            raise at_odds(
                "training.class_weights.given",
                self.given,
                f"training.class_weights.kind is {self.kind}",
                "give the weight of each label together with kind given, or leave both out",
            )
        return self
