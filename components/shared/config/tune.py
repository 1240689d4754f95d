"""Studies: hyperparameter tuning, an ablation's changes, and the folds of a data set."""

from __future__ import annotations

import json
import math
from typing import Annotated, Any, Final, Literal, Self, get_args

from pydantic import AfterValidator, Field, field_validator, model_validator

from steadytrain.components.shared.effects import Effect, IfSet, Section, at_odds

_LARGEST: Final = 1e15
_MOST_CHOICES: Final = 1_000


class Dimension(Section):
    """The values that one field may take: a range with `low` and `high`, or `choices`."""

    low: int | float | None = Field(None, description="Smallest value of the range.")
    high: int | float | None = Field(None, description="Largest value of the range.")
    log: bool = Field(
        False, description="Sample the logarithm uniformly, as suits a learning rate."
    )
    step: int | float | None = Field(
        None, gt=0, description="Distance of the values of the range. None means any value."
    )
    choices: list[Any] | None = Field(None, description="The values, instead of a range.")
    when: dict[str, Any] = Field(
        default={},
        description="Vary the field only in trials in which other fields of the space have "
        "these values (a value, or a list of values, by field). Otherwise the trial keeps the "
        "configuration's own value.",
    )

    @model_validator(mode="after")
    def _not_too_wide(self) -> Self:
        if self.low is not None and self.high is not None:
            width = float(self.high) - float(self.low)
            if math.isinf(width):
                raise ValueError("the range is wider than the largest number")
            if self.step is not None and width / self.step > _LARGEST:
                raise ValueError(f"the range has too many steps of {self.step:g}")
        return self

    @model_validator(mode="after")
    def _range_or_choices(self) -> Self:
        if self.choices is not None:
            if (self.low, self.high, self.step) != (None, None, None) or self.log:
                raise ValueError("has both choices and a range: give one of the two")
            if len({json.dumps(choice, sort_keys=True) for choice in self.choices}) < 2:
                raise ValueError("needs at least two different choices")
            if len(self.choices) > _MOST_CHOICES:
                raise ValueError(
                    f"has {len(self.choices):,} choices, each of which is checked first: give at "
                    f"most {_MOST_CHOICES:,}, or a range with a step"
                )
            return self
        if self.low is None or self.high is None:
            raise ValueError("needs low and high, or choices")
        if not self.low < self.high:
            raise ValueError(
                f"the range is empty: low {self.low:g} is not below high {self.high:g}"
            )
        if self.log and (self.low <= 0 or self.step is not None):
            raise ValueError("log needs low above 0, and has no step")
        if self.step is not None:
            steps = (self.high - self.low) / self.step
            if abs(steps - round(steps)) > 1e-6:
                raise ValueError(
                    f"high {self.high:g} is not low {self.low:g} plus a whole number of steps of "
                    f"{self.step:g}"
                )
        return self

    @property
    def ends(self) -> tuple[float, float]:
        """Smallest and largest value of a range."""
        assert self.low is not None
        assert self.high is not None
        return self.low, self.high

    def allows(self, field: str, value: object) -> bool:
        """Return whether `when` allows a value of another field."""
        wanted = self.when[field]
        return value in wanted if isinstance(wanted, list) else value == wanted


class Objective(Section):
    """A validation metric to optimize."""

    metric: str = Field("loss", min_length=1, description="Name of the validation metric.")
    direction: Literal["minimize", "maximize"] = Field(
        "minimize", description="Whether lower or higher is better."
    )


class TuneBudget(Section):
    """What a study may spend. It ends when any limit is reached; a larger one continues it."""

    trials: int = Field(100, ge=1, le=100_000, description="Number of trials.")
    steps: int | None = Field(
        None, ge=1, description="Optimizer steps of all trials together. None means no limit."
    )
    tokens: float | None = Field(
        None,
        gt=0,
        le=_LARGEST,
        description="Training tokens of all trials together, with full sequences. None means no "
        "limit.",
    )
    hours: float | None = Field(
        None,
        gt=0,
        le=1e6,
        description="Hours of training of all trials together. None means no limit.",
    )
    usd: float | None = Field(
        None,
        gt=0,
        le=1e9,
        description="USD for these hours at compute.price_per_hour. None means no limit.",
    )
    parallel: int = Field(1, ge=1, le=1000, description="Trials that train at the same time.")


class TuneConstraints(Section):
    """Limits on a trial.

    Suggestions with too many parameters or too much memory are replaced before they train.
    """

    parameters: int | None = Field(
        None, ge=1, description="Largest number of the model's parameters. None means no limit."
    )
    memory_gb: float | None = Field(
        None,
        gt=0,
        description="Most memory of a rank by the planner's formula, with "
        "training.micro_batch_size or, if that is not set, one sequence at a time, and with ddp if "
        "compute.strategy is auto. None means no limit.",
    )
    latency_ms: float | None = Field(
        None,
        gt=0,
        description="Longest time in milliseconds that the exported model may take for a forward "
        "pass of one sequence of data.sequence_length tokens. The trial measures it before it "
        "trains, on the device that it trains on. A slower trial ends at its first rung and "
        "cannot be the best. None means no limit.",
    )


class TuneConfig(Section):
    """What `steadytrain tune` varies, optimizes and spends.

    Of other commands, `ablate` and `cross-validate` read the log and the limits of the budget, and
    `automl` reads `seed`, `log` and `max_failed_share`.
    """

    space: dict[str, Dimension] = Field(
        default={},
        description="The fields to vary, such as training.learning_rate, each with its values.",
    )
    objective: Objective = Objective()
    more_objectives: list[Objective] = Field(
        default=[],
        description="Further metrics. The result is then a Pareto front, and pruner must be none.",
    )
    sampler: Literal["tpe", "random", "grid", "gp", "qmc", "cmaes"] = Field(
        "tpe",
        description="How new trials are chosen. tpe: tree-structured Parzen estimator; gp: "
        "Gaussian process; cmaes: CMA-ES over the ranges without a condition, everything else at "
        "random; qmc: a scrambled Sobol sequence; grid: every combination.",
    )
    pruner: Literal["none", "median", "asha", "hyperband"] = Field(
        "hyperband",
        description="Which trials go on at a rung. median: those not worse than the median; asha: "
        "the best 1/reduction_factor, as soon as enough have reached the rung; hyperband: the "
        "same from several smallest rungs; none: all.",
    )
    reduction_factor: int = Field(
        3, ge=2, le=100, description="A rung has this many times the steps of the one before."
    )
    min_steps: int | None = Field(
        None,
        ge=1,
        description="Optimizer steps of the smallest rung, rounded up to a multiple of "
        "training.eval_steps. None means a full trial divided twice by reduction_factor, "
        "with median a tenth.",
    )
    min_tokens: float | None = Field(
        None,
        gt=0,
        le=_LARGEST,
        description="Training tokens of the smallest rung, with full sequences, instead of "
        "min_steps.",
    )
    fidelity: Literal["steps", "tokens"] = Field(
        "steps",
        description="What all trials have in common at a rung. tokens: a trial whose "
        "training.global_batch_size or data.sequence_length differs from the configuration's own "
        "gets more or fewer training.max_steps and training.eval_steps. Settings of tune in "
        "optimizer steps are then steps of the configuration's own batch size and length.",
    )
    budget: Annotated[TuneBudget, Effect.STUDY_LIMIT] = TuneBudget()
    constraints: TuneConstraints = TuneConstraints()
    max_failed_share: Annotated[float, Effect.STUDY_LIMIT] = Field(
        0.2,
        ge=0,
        le=1,
        description="Share of budget.trials that may fail before the study stops. A search of "
        "`automl` stops only if so many of its first configurations, and at least two, all fail.",
    )
    seed: int = Field(42, ge=0, description="Seed of the study's suggestions.")
    seeds: Annotated[int, Effect.STUDY_LIMIT] = Field(
        3,
        ge=0,
        le=100,
        description="Seeds on which the winner is trained again in the end. The best of these "
        "models is evaluated, compared with the champion and registered. 0 leaves this out.",
    )
    log: Annotated[str | None, Effect.STUDY_LIMIT] = Field(
        None,
        min_length=1,
        description="Folder or s3:// address of the logs of studies. None means the folders of "
        "the studies.",
    )

    @property
    def objectives(self) -> tuple[Objective, ...]:
        """All objectives. The first one decides what goes on at a rung."""
        return self.objective, *self.more_objectives

    @property
    def ranges(self) -> list[str]:
        """The fields with a range and without a condition: those that cmaes searches."""
        return [
            field
            for field, dimension in self.space.items()
            if dimension.choices is None and not dimension.when
        ]

    @field_validator("more_objectives")
    @classmethod
    def _at_most_a_few(cls, more: list[Objective]) -> list[Objective]:
        if len(more) > 4:
            raise ValueError("a Pareto front of more than 5 objectives says nothing: give fewer")
        return more

    @field_validator("log")
    @classmethod
    def _folder_or_s3(cls, address: str | None) -> str | None:
        if address is not None and "://" in address and not address.startswith("s3://"):
            raise ValueError("give a folder, or s3://BUCKET/PREFIX")
        return address


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
    repeats: Annotated[int, Effect.FOLDS, IfSet()] = Field(
        1,
        ge=1,
        le=20,
        description="How often the training side is divided, each time differently. Every record "
        "is held out once in each division.",
    )
    fold: Annotated[int | None, Effect.FOLD] = Field(
        None,
        ge=0,
        description="The fold that a run holds out, from 0: it trains on the others, and is "
        "evaluated on this one instead of on the test side. Those of the second division follow "
        "those of the first. `steadytrain cross-validate` sets it for each of its runs. None means "
        "that a run trains on the whole training side.",
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
        if self.fold is not None and self.fold >= self.splits:
            times = "" if self.repeats == 1 else f" in each of {self.repeats} divisions"
            raise at_odds(
                "cross_validation.fold",
                self.fold,
                f"there are {self.folds} folds{times}, numbered from 0 (cross_validation.folds)",
                f"use a number below {self.splits}, or leave it out",
            )
        return self

    @property
    def splits(self) -> int:
        """The number of folds of all divisions."""
        return self.folds * self.repeats

    def named(self, fold: int) -> str:
        """Return the name of a fold."""
        division, number = divmod(fold, self.folds)
        return (
            f"fold {number}" if self.repeats == 1 else f"fold {number} of division {division + 1}"
        )


Quality = Literal["fast", "good", "best"]
FOLDS: Final[dict[Quality, int]] = {"fast": 4, "good": 8, "best": 8}
"""Folds on which each configuration is trained, by quality."""
REPEATS: Final[dict[Quality, int]] = {"fast": 1, "good": 2, "best": 3}
"""How often a small table is divided into them."""


class AutoMLBudget(Section):
    """What a search may spend. It ends when any limit is reached; a larger one continues it."""

    units: int | None = Field(
        None,
        ge=1,
        le=100_000,
        description="Number of units, each of which is one configuration on one fold. A "
        "configuration begins only if all its folds fit. None means as many as the quality asks "
        "for.",
    )
    trials: int | None = Field(
        None,
        ge=1,
        le=100_000,
        description="Number of configurations, each on all folds. None means as many as the units "
        "or the quality ask for.",
    )
    hours: float | None = Field(
        None,
        gt=0,
        le=1e6,
        description="Hours of wall time from the command's start to its end: units, ensemble, "
        "and the run of the winner. Units that are not expected to end in time do not begin, and "
        "those that train when only the winner's time is left are stopped and left out. If a "
        "search is continued, the time between the commands does not count. None means no limit.",
    )
    usd: float | None = Field(
        None,
        gt=0,
        le=1e9,
        description="USD for the hours of training of all units together at "
        "compute.price_per_hour. None means no limit.",
    )
    unit_minutes: float | None = Field(
        None,
        gt=0,
        le=1e6,
        description="Minutes of wall time after which a unit is killed and counts as failed. They "
        "count from when its data are prepared; that may take 10 times as long, and at least 10 "
        "minutes. None means 10 times what the units before it let expect, and at least 10 "
        "minutes; before the first ones, 6 hours for the data, or more where the command itself "
        "took long to begin; on a cluster, no limit.",
    )
    parallel: int | None = Field(
        None,
        ge=1,
        le=1000,
        description="Units that train at the same time. None means one for each core of this "
        "machine, or of networks for each GPU, at most 8; on a cluster, 8, or as many as find "
        "room.",
    )


class AutoMLConstraints(Section):
    """Limits on the model. Configurations that miss one are shown, and are in no ensemble."""

    latency_ms: float | None = Field(
        None,
        gt=0,
        description="Longest time in milliseconds for a record, as the median over records. That "
        "of an ensemble is the sum over its members. Images are read at the size that the model "
        "reads. None means no limit.",
    )
    model_mb: float | None = Field(
        None,
        gt=0,
        description="Largest size of the exported model in megabytes. None means no limit.",
    )
    memory_gb: Annotated[float | None, IfSet()] = Field(
        None,
        gt=0,
        description="Most memory in GB of a unit's processes on this machine. A unit that takes "
        "more is killed and counts as failed. None means that the units that train at once share "
        "nine tenths of this machine's memory, or of its control group's. On a cluster, "
        "compute.pods.memory is the limit.",
    )
    frameworks: list[str] = Field(
        [], description="The only values that model.framework may have. Empty means all."
    )
    interpretable: bool = Field(
        False,
        description="Only models that people can read, which are linear ones, and one alone.",
    )


class AutoMLConfig(Section):
    """What `steadytrain automl` searches. It does not affect other commands.

    The seed of the search and the address of its log are those of `tune`.
    """

    quality: Quality | None = Field(
        None,
        description="How much is tried. fast: the first 8 configurations of the portfolio, or 4 "
        "networks, on 4 folds; good, which None means too: the whole portfolio on 8 folds; best: "
        "then as many again, which are searched for around the best.",
    )
    repeats: Annotated[int | None, IfSet()] = Field(
        None,
        ge=1,
        le=20,
        description="How often the training side is divided into folds, each time differently. "
        "None means, for a source of fewer than 2,000 records, 2 times for good and 3 for best, "
        "else once; also once for networks, and with automl.budget.hours below 0.25.",
    )
    decision: Annotated[Literal["likeliest", "balanced_accuracy", "macro_f1"], IfSet()] = Field(
        "likeliest",
        description="Which class the model predicts: the likeliest one, or the one with which this "
        "metric is best, by a weight of each class (of two classes, a threshold). Sets of labels "
        "have a threshold for each label with macro_f1, instead of a half. They are fitted to "
        "out-of-fold predictions and exported with the model.",
    )
    budget: Annotated[AutoMLBudget, Effect.STUDY_LIMIT] = AutoMLBudget()
    constraints: AutoMLConstraints = AutoMLConstraints()
