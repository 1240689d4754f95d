"""What a run learns when: its order, and how long its documents are."""

from __future__ import annotations

from accelerate import Accelerator

from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.records import DataRecord
from steadytrain.components.tasks.base import TrainingTask
from steadytrain.components.techniques.curriculum import CUTS
from steadytrain.components.techniques.curriculum.order import (
    Curriculum,
    SequenceLength,
    difficulty_of,
)
from steadytrain.components.techniques.multi_task.mixture import mixture_of
from steadytrain.components.train.loop.data import Rows
from steadytrain.components.train.loop.order import Order, order_of
from steadytrain.components.train.loop.row_losses import row_losses
from steadytrain.components.train.loop.watch import Watch


def run_order(
    config: RunConfig,
    data: DataRecord,
    rows: Rows,
    task: TrainingTask,
    accelerator: Accelerator,
    watch: Watch,
    *,
    steps: int,
) -> Order:
    """Return which rows make up each global batch.

    Args:
        rows: of the training side.
        watch: what this rank does while a curriculum's reference model scores the rows.
        steps: of the full training run.

    Raises:
        BadInput, DataError, PluginFailed: as for `order_of`, `difficulty_of` and `row_losses`.
        StoppedEarly: as for `row_losses`.
    """
    training = config.training
    order = order_of(rows, task, training)
    if training.multi_task.sampling != "size":
        return mixture_of(rows.values("label"), data.labels, training.multi_task, training.seed)
    if not training.curriculum.orders:
        return order
    if training.curriculum.by == "loss":
        difficulty = row_losses(config, data, rows, accelerator, watch)
    else:
        difficulty = difficulty_of(rows, training.curriculum, getattr(task, "padded", ""))
    return Curriculum(
        order,
        difficulty,
        training.curriculum,
        seed=training.seed,
        batch=training.global_batch_size,
        steps=training.curriculum.steps(steps),
    )


def sequences_of(config: RunConfig, data: DataRecord, *, steps: int) -> SequenceLength | None:
    """Return what cuts the documents of early steps; None if nothing does.

    Args:
        steps: of the full training run.
    """
    training = config.training
    if training.curriculum.by != CUTS:
        return None
    return SequenceLength(
        training.curriculum,
        data.sequence_length or config.data.sequence_length,
        batch=training.global_batch_size,
        steps=training.curriculum.steps(steps),
    )
