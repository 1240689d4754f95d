"""Settings that do something else than they say for this number of rows and steps."""

from __future__ import annotations

from collections.abc import Iterator

from steadytrain.components.shared.config import TrainingConfig
from steadytrain.components.shared.config.schedules import schedule_spec, validations_to_act


def without_effect(training: TrainingConfig, rows: int | None, steps: int) -> Iterator[str]:
    """Yield a sentence for each such setting.

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
