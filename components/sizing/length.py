"""How much there is to train on, as far as is known, and settings that do not fit it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from steadytrain.components.shared.config import RunConfig, TrainingConfig
from steadytrain.components.shared.config.schedules import schedule_spec, validations_to_act
from steadytrain.components.shared.records import DataRecord
from steadytrain.components.shared.workspace import Workspace
from steadytrain.components.tasks.base import load_task


@dataclass(frozen=True)
class Length:
    """The length of the complete training run.

    rows: training sequences; None if the data are not prepared.
    steps: optimizer steps; None if unknown.
    tokens: of all steps, without padding if the data report it; None if unknown.
    source: where this comes from, or how to find out.
    """

    rows: int | None
    steps: int | None
    tokens: float | None
    source: str


def total_steps(training: TrainingConfig, rows: int, batch: int | None = None) -> int:
    """Return the number of optimizer steps of the full training run.

    Args:
        batch: rows of a step; None means `training.global_batch_size`.
    """
    if training.max_steps > 0:
        return training.max_steps
    return math.ceil(training.num_train_epochs * rows / (batch or training.global_batch_size))


def length_of(config: RunConfig, global_batch: int) -> Length:
    """Return the length from the prepared data, else from `training.max_steps`.

    Raises:
        BadInput: the record of the data has another version.
    """
    training, data = config.training, prepared(config)
    full = global_batch * config.data.sequence_length * load_task(config.data.task).sequences
    if data is not None:
        side = data.sides["train"]
        steps = training.max_steps
        if steps < 0:
            steps = math.ceil(training.num_train_epochs * side.rows / global_batch)
        each = side.tokens / side.rows if side.tokens and side.rows else full / global_batch
        source = f"the prepared data: {side.rows:,} sequences of {each:,.0f} tokens on average"
        return Length(side.rows, steps, steps * global_batch * each, source)
    if training.max_steps > 0:
        tokens = float(training.max_steps * full)
        return Length(None, training.max_steps, tokens, "training.max_steps, with full sequences")
    return Length(
        None,
        None,
        None,
        "run `steadytrain step preprocess FILE` first, or set training.max_steps",
    )


def prepared(config: RunConfig) -> DataRecord | None:
    """Return the prepared data of a run; None if there are none yet.

    Raises:
        BadInput: their record has another version.
    """
    path = Workspace.of(config).record("preprocess")
    return DataRecord.load(path) if path.is_file() else None


def without_effect(training: TrainingConfig, rows: int | None, steps: int) -> Iterator[str]:
    """Yield a sentence for each setting that does not do what it says in that many steps.

    Args:
        rows: number of rows of the training side; None if it is not known yet.
        steps: optimizer steps of the full training run.
    """
    batch = training.global_batch_size
    if rows is not None and batch > rows:
        yield (
            f"training.global_batch_size = {batch}: the training side has {rows:,} rows, so each "
            f"step repeats rows; use {rows:,} or fewer"
        )
    warmup = training.warmup_steps
    if schedule_spec(training.lr_scheduler_type).warms_up and warmup >= max(1, steps):
        yield (
            f"training.warmup_steps = {warmup:g}: training has {steps:,} steps, so only the last "
            "one has the full learning rate; use fewer steps, or a share below 1"
        )
    if training.never_stops_early(steps):
        yield (
            f"training.early_stopping_patience = {training.early_stopping_patience}: with "
            f"training.eval_steps {training.eval_steps}, training ends after {steps:,} steps, "
            "before it can act; lower one of the two"
        )
    needed = validations_to_act(training)
    if needed and needed * training.eval_steps >= steps:
        yield (
            f"training.lr_scheduler_type = {training.lr_scheduler_type}: it first changes the rate "
            f"after {needed} validations, and training ends after {steps:,} steps with "
            f"training.eval_steps {training.eval_steps}; lower its patience or training.eval_steps"
        )
