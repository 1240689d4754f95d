"""What a run learns when: its order, and how long its documents are."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

from accelerate import Accelerator

from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.records import DataRecord
from steadytrain.components.tasks.base import Row, TrainingTask
from steadytrain.components.techniques.curriculum import CUTS, CurriculumConfig
from steadytrain.components.train.loop.curriculum import Curriculum, difficulty_of, share_at
from steadytrain.components.train.loop.data import Rows
from steadytrain.components.train.loop.mixture import mixture_of
from steadytrain.components.train.loop.order import Order, order_of
from steadytrain.components.train.loop.row_losses import row_losses
from steadytrain.components.train.loop.watch import Watch

# Progressive sequence length: early steps cut documents into shorter ones.
#
# From Li et al. 2022, "The Stability-Efficiency Tradeoff: Investigating Sequence Length Warmup for
# Training GPT Models". The paper truncates each sequence and drops the rest. Here, a document of
# more tokens than the current length becomes several documents of that length, as in Jin et al.
# 2023, "GrowLength": every token stays in its row, so the tokens of a global batch, its shapes and
# its memory are those of full length. Only the first token of each part is no target any more.
#
# The length depends on the number of the global batch alone.

LENGTHS: Final = 16
"""Different lengths at most: they are multiples of a sixteenth of the full one, rounded up."""


class SequenceLength:
    """The longest document of each global batch.

    Args:
        full: tokens of a row.
        batch: rows in a global batch.
        steps: of the curriculum.
    """

    def __init__(self, config: CurriculumConfig, full: int, *, batch: int, steps: int) -> None:
        self.config, self.full, self.batch, self.steps = config, full, batch, steps

    def at(self, number: int) -> int:
        """Return the most tokens of a document in a global batch, at least 2."""
        share = math.ceil(share_at(self.config, number / self.steps) * LENGTHS)
        return max(2, math.ceil(share * self.full / LENGTHS))

    def cut(self, row: Row, place: int) -> Row:
        """Return a packed row with its documents cut.

        Args:
            place: of the row in the endless stream of training rows.
        """
        longest = self.at(place // self.batch)
        lengths = [part for length in row["lengths"] for part in _parts(int(length), longest)]
        return {**row, "lengths": lengths}


def _parts(length: int, longest: int) -> Iterator[int]:
    while length > longest:
        yield longest
        length -= longest
    yield length


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
