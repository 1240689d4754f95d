"""Ablation: which changes to compare, and on how many seeds."""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, Field

from steadytrain.components.shared.config.base import Section
from steadytrain.components.shared.config.effects import Effect

Design = Literal["leave_one_out", "one_at_a_time"]
DESIGNS: tuple[Design, ...] = get_args(Design)


def _named_and_not_empty(changes: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    for name, values in changes.items():
        if not name.strip() or not name.isprintable():
            raise ValueError(f"{name!r} cannot be shown as a name: use letters")
        if not values:
            raise ValueError(f"{name} changes no field")
    return changes


Changes = Annotated[dict[str, dict[str, Any]], AfterValidator(_named_and_not_empty)]
"""Changes of a configuration by name, each with the fields that it sets."""


class AblationConfig(Section):
    """What `steadytrain ablate` compares. It does not affect other commands.

    The objective, the limits of the budget and the log are those of `tune`.
    """

    changes: Changes = Field(
        default={},
        description="The changes by name, each with the fields that it sets, such as "
        "no_decay: {training.weight_decay: 0.0}.",
    )
    designs: list[Design] = Field(
        ["leave_one_out"],
        min_length=1,
        description="leave_one_out: all changes together, compared with all but one; "
        "one_at_a_time: the configuration as it is, compared with one change.",
    )
    seeds: Annotated[int, Effect.STUDY_LIMIT] = Field(
        5,
        ge=2,
        le=1000,
        description="Seeds that every variant is trained on: training.seed and those after it.",
    )
    confidence: Annotated[float, Effect.STUDY_LIMIT] = Field(
        0.95,
        gt=0,
        lt=1,
        description="Probability with which all intervals together contain the true differences.",
    )
