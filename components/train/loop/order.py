"""The training order: which rows make up a global batch.

The order is an endless stream of seeded permutations of all rows. Step s uses the rows that start
at position s * global batch. So the step alone determines the position, no epoch's tail is dropped,
and neither micro-batch nor world size changes which rows make up a global batch.

If rows are padded to the longest one, the rows of a global batch have similar lengths. Within each
pool of GROUPED_BATCHES global batches of the permutation, rows are sorted by length, as in
Transformers' `group_by_length`, and then the batches are shuffled.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from steadytrain.components.shared.errors import DataError
from steadytrain.components.tasks.base import TrainingTask
from steadytrain.components.train.loop.data import Rows

GROUPED_BATCHES = 50
"""Global batches per pool, as in Transformers: little padding, but batches still differ a lot."""


def order_of(rows: Rows, task: TrainingTask, *, seed: int, batch: int) -> RowOrder:
    """Return the order for a task.

    Args:
        batch: rows in a global batch.
    """
    # A user-defined task may not have this attribute.
    column = getattr(task, "padded", "")
    return RowOrder(len(rows), seed, rows.lengths(column) if column else None, batch)


class RowOrder:
    """The row order. It depends only on the seed, the number of rows, the lengths, and the batch.

    Args:
        lengths: row lengths, to group rows of similar length; None to leave them ungrouped.
        batch: rows in a global batch.
    """

    def __init__(
        self,
        rows: int,
        seed: int,
        lengths: npt.NDArray[np.int32] | None = None,
        batch: int = 1,
    ) -> None:
        if rows < 1:
            raise DataError(
                "the training side has no rows", remedy="give more data, or smaller held-out shares"
            )
        self.rows, self.seed, self.lengths, self.batch = rows, seed, lengths, batch
        self._epoch, self._permutation = -1, np.empty(0, dtype=np.int64)

    def take(self, position: int, count: int) -> list[int]:
        """Return the indices of `count` rows of the stream, starting at `position`."""
        return [self._at(place) for place in range(position, position + count)]

    def _at(self, place: int) -> int:
        epoch, offset = divmod(place, self.rows)
        if epoch != self._epoch:
            self._epoch, self._permutation = epoch, self._permute(epoch)
        return int(self._permutation[offset])

    def _permute(self, epoch: int) -> npt.NDArray[np.int64]:
        random = np.random.default_rng([self.seed, epoch])
        found = random.permutation(self.rows)
        if self.lengths is None:
            return found
        # The rows before these complete the previous epoch's last batch.
        first = -epoch * self.rows % self.batch
        rest = found[first:]
        pools = np.arange(len(rest)) // (self.batch * GROUPED_BATCHES)
        rest = rest[np.lexsort((-self.lengths[rest], pools))]
        whole = len(rest) // self.batch
        batches = rest[: whole * self.batch].reshape(whole, self.batch)
        # The incomplete last batch stays last; the next epoch completes it.
        tail = rest[whole * self.batch :]
        return np.concatenate([found[:first], random.permutation(batches).ravel(), tail])
