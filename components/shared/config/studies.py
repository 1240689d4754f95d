"""Studies that compare: an ablation's changes on several seeds, and cross-validation's folds."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self, get_args

from pydantic import AfterValidator, Field, model_validator

from steadytrain.components.shared.effects import Effect
from steadytrain.components.shared.section import Section, at_odds

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


class CrossValidationConfig(Section):
    """What `steadytrain cross-validate` trains. Other commands read `fold` alone.

    The limits of the budget and the log are those of `tune`.
    """

    folds: Annotated[int, Effect.FOLDS] = Field(
        5,
        ge=2,
        le=100,
        description="Folds into which the training side is divided: stratified by label, and "
        "with the records of a data.columns.group, or of a prompt, together.",
    )
    fold: Annotated[int | None, Effect.FOLD] = Field(
        None,
        ge=0,
        description="The fold that a run holds out, from 0: it trains on the others, and is "
        "evaluated on this one instead of on the test side. `steadytrain cross-validate` sets it "
        "for each of its runs. None means that a run trains on the whole training side.",
    )
    compare: Changes = Field(
        default={},
        description="Further configurations by name, each with the fields that it sets, such as "
        "no_decay: {training.weight_decay: 0.0}. Each is compared with the configuration as it is, "
        "on the same folds.",
    )
    confidence: Annotated[float, Effect.STUDY_LIMIT] = Field(
        0.95, gt=0, lt=1, description="Probability with which an interval contains the true value."
    )

    @model_validator(mode="after")
    def _one_of_the_folds(self) -> Self:
        if self.fold is not None and self.fold >= self.folds:
            raise at_odds(
                "cross_validation.fold",
                self.fold,
                f"there are {self.folds} folds, numbered from 0 (cross_validation.folds)",
                f"use a number below {self.folds}, or leave it out",
            )
        return self
