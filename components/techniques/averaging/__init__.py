"""Averages of the weights: the settings."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Final, Literal

from pydantic import Field, model_validator

from steadytrain.components.shared.effects import at_odds, whole_steps
from steadytrain.components.techniques.settings import Recipe, Rule, TechniqueConfig


class AveragingConfig(TechniqueConfig):
    """An average of the weights, validated next to them."""

    kind: Literal["none", "ema", "swa"] = Field(
        "none",
        description="none, ema (exponential moving average of the weights) or swa (their mean).",
    )
    decay: float = Field(
        0.999, gt=0, lt=1, description="Share of the old average in the new one. Only for ema."
    )
    warmup: bool = Field(
        True,
        description="Lower decay to (1 + n) / (10 + n) for the update n of the average. Only for "
        "ema.",
    )
    start: Annotated[float, Field(ge=0)] = Field(
        0, description="Optimizer steps before averaging. A value below 1 is a share of all steps."
    )
    every: int = Field(1, ge=1, description="Optimizer steps between updates of the average.")
    export: Literal["best", "raw", "averaged"] = Field(
        "best",
        description="Weights to select and export: averaged, raw, or the better of the two by "
        "validation.",
    )

    @model_validator(mode="after")
    def _is_read(self) -> AveragingConfig:
        fields = type(self).model_fields
        unread = {"none": set(fields) - {"kind"}, "swa": {"decay", "warmup"}, "ema": set()}
        for name in sorted(unread[self.kind]):
            if getattr(self, name) != fields[name].default:
                raise at_odds(
                    f"training.averaging.{name}",
                    getattr(self, name),
                    f"training.averaging.kind is {self.kind}",
                    f"set kind to {'ema' if self.kind == 'swa' else 'ema or swa'}, or leave it out",
                )
        return self

    @property
    def on(self) -> bool:
        """Whether weights are averaged."""
        return self.kind != "none"

    @property
    def weight_copies(self) -> int:
        return int(self.on)

    def features(self) -> Iterator[tuple[str, str, str]]:
        if self.on:
            for name in ("averaging", "training.averaging"):
                yield name, "training.averaging.kind", self.kind

    def check(self, recipe: Recipe) -> None:
        steps = recipe.max_steps
        if self.on and self.start >= steps > 0:
            raise at_odds(
                "training.averaging.start",
                self.start,
                f"training.max_steps is {steps}, so nothing would be averaged",
                "use fewer steps, or a share of all steps below 1",
            )
        if self.on and self.first_step(steps) > steps > 0:
            raise at_odds(
                "training.averaging.every",
                self.every,
                f"training.max_steps is {steps}, so nothing would be averaged",
                "use fewer steps, or start earlier",
            )

    def first_step(self, steps: int) -> int:
        """Return the first step whose weights are averaged, in a run of so many steps."""
        return whole_steps(self.start, steps) + self.every


RULES: Final = (
    Rule("training.averaging", "exporting component", "both replace the exported weights"),
)
