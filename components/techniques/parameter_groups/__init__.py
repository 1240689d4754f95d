"""Parameters that are trained in another way than the rest, selected by their names."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Final

from pydantic import Field, field_validator, model_validator

from steadytrain.components.shared.effects import Section
from steadytrain.components.techniques.settings import PYTORCH_ONLY, Rule

FROZEN: Final = "training.param_groups frozen"
UNFREEZE_AT: Final = "training.param_groups unfreeze_at"
"""What rules call groups with these fields."""


class ParamGroupConfig(Section):
    """Parameters whose names match a pattern, and how they are trained."""

    match: str = Field(
        ...,
        min_length=1,
        description="Regular expression that is searched for in the names of the parameters.",
    )
    lr_scale: float = Field(1.0, gt=0, description="Factor on the learning rate.")
    weight_decay: float | None = Field(
        None,
        ge=0,
        description="Weight decay, also of biases and norms. None means training.weight_decay.",
    )
    frozen: bool = Field(False, description="Never train them.")
    unfreeze_at: Annotated[float, Field(gt=0)] | None = Field(
        None,
        description="Optimizer steps before they are trained. A value below 1 is a share of all "
        "steps. None means they are trained from the first step.",
    )

    @field_validator("match")
    @classmethod
    def _is_a_pattern(cls, pattern: str) -> str:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"is not a regular expression: {error}") from None
        return pattern

    @model_validator(mode="after")
    def _frozen_stays_frozen(self) -> ParamGroupConfig:
        ignored = [
            name
            for name, field in type(self).model_fields.items()
            if name not in ("match", "frozen") and getattr(self, name) != field.default
        ]
        if self.frozen and ignored:
            raise ValueError(f"frozen parameters are never trained: leave out {', '.join(ignored)}")
        return self

    def features(self, index: int) -> Iterator[tuple[str, str, str]]:
        """As for `TechniqueConfig`.

        Args:
            index: in `training.param_groups`.
        """
        field = f"training.param_groups.{index}"
        yield "training.param_groups", field, self.match
        if self.frozen:
            yield FROZEN, f"{field}.frozen", "true"
        if self.unfreeze_at is not None:
            yield UNFREEZE_AT, f"{field}.unfreeze_at", f"{self.unfreeze_at:g}"


RULES: Final = (
    *(
        Rule(f"training.{name}", "another framework", PYTORCH_ONLY)
        for name in ("param_groups", "layer_decay")
    ),
    *(
        Rule(setting, "adapters", "adapters freeze the model's own weights, and only they learn")
        for setting in (FROZEN, UNFREEZE_AT)
    ),
    Rule(UNFREEZE_AT, "sharding", "sharding decides at the start which weights have gradients"),
)
