"""The order of training: which rows make up a global batch.

It is an endless stream: one seeded permutation of all rows after another. Step s takes the rows
at s * global batch and on, so that the step alone tells the position, no epoch's tail is dropped,
and neither micro-batch nor world size changes which rows make up a global batch.

Where rows are padded to the longest, those of a global batch are about equally long: within each
pool of GROUPED_BATCHES global batches of the permutation, rows are sorted by length, as
Transformers' `group_by_length` does, and the batches then come in an order of their own.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from steadytrain.components.shared.errors import DataError
from steadytrain.components.tasks.base import Task
from steadytrain.components.train.loop.data import Rows

GROUPED_BATCHES = 50
"""Of a pool, as in Transformers: little padding, and batches that still differ much."""


def order_of(rows: Rows, task: Task, *, seed: int, batch: int) -> RowOrder:
    """The order for a task.

    Args:
        batch: rows of a global batch.
    """
    # A task of a user's own may do without.
    column = getattr(task, "padded", "")
    return RowOrder(len(rows), seed, rows.lengths(column) if column else None, batch)


class RowOrder:
    """The same for equal seeds, numbers of rows, lengths and global batches.

    Args:
        lengths: of the rows, where those of about equal length are to come together.
        batch: rows of a global batch.
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
        """Indices of `count` rows of the stream from `position` on."""
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
        # The rows before complete the last batch of the epoch before.
        first = -epoch * self.rows % self.batch
        rest = found[first:]
        pools = np.arange(len(rest)) // (self.batch * GROUPED_BATCHES)
        rest = rest[np.lexsort((-self.lengths[rest], pools))]
        whole = len(rest) // self.batch
        batches = rest[: whole * self.batch].reshape(whole, self.batch)
        # The last one, which the next epoch completes, stays the last.
        tail = rest[whole * self.batch :]
        return np.concatenate([found[:first], random.permutation(batches).ravel(), tail])
