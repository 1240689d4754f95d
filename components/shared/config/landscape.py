"""The loss around the trained weights, on a plane of two random directions."""

from __future__ import annotations

from typing import Self

from pydantic import Field, field_validator, model_validator

from steadytrain.components.shared.config.base import Section, at_odds


class LandscapeConfig(Section):
    """Loss of the trained model on a grid around its weights (Li et al. 2018)."""

    points: int = Field(
        0,
        ge=0,
        le=51,
        description="Points on each side of the square grid: an odd number, such as 15, so that "
        "the trained weights are in the middle. 0 turns it off.",
    )
    radius: float = Field(
        1.0,
        gt=0,
        le=100,
        description="Farthest step along each of the two directions. A step of 1 along one of them "
        "is as long as the weights themselves, filter by filter.",
    )
    records: int = Field(
        64, ge=1, description="Size of the fixed sample of test records that the loss is taken on."
    )

    @property
    def on(self) -> bool:
        """Whether it is measured."""
        return self.points > 0

    @property
    def scorings(self) -> int:
        """How often the sample is scored."""
        return self.points**2

    @field_validator("points")
    @classmethod
    def _has_a_middle(cls, points: int) -> int:
        if points and (points < 3 or points % 2 == 0):
            raise ValueError("is not an odd number from 3 to 51: use 15, or 0 to turn it off")
        return points

    @model_validator(mode="after")
    def _is_read(self) -> Self:
        for name in ("radius", "records"):
            value = getattr(self, name)
            if not self.on and value != type(self).model_fields[name].default:
                raise at_odds(
                    f"evaluation.landscape.{name}",
                    value,
                    "with evaluation.landscape.points 0, nothing reads it",
                    "set evaluation.landscape.points, such as 15, or leave it out",
                )
        return self
