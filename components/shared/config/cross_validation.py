"""Cross-validation: the number of folds, and the configurations to compare on them."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from steadytrain.components.shared.config.ablation import Changes
from steadytrain.components.shared.config.base import Section, at_odds
from steadytrain.components.shared.config.effects import Effect


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
