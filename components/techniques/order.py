"""The order of the rows: a stream without end, of which each step takes the next global batch.

The default order is a stream of seeded permutations of all rows: no epoch's tail is dropped. If
rows are padded to the longest one, the rows of a global batch have similar lengths. Within each
pool of GROUPED_BATCHES global batches of the permutation, rows are sorted by length, as in
Transformers' `group_by_length`, and then the batches are shuffled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

GROUPED_BATCHES = 50
"""Global batches per pool, as in Transformers: little padding, but batches still differ a lot."""


@runtime_checkable
class Order(Protocol):
    """An endless stream of rows that depends only on what the order was created from."""

    def take(self, position: int, count: int) -> Sequence[int]:
        """Return the indices of `count` rows of the stream, starting at `position`.

        The result must not depend on earlier calls: a resumed run starts at any position.
        """


class RowColumns(Protocol):
    """What an order may read of the training rows."""

    @property
    def columns(self) -> Sequence[str]: ...

    def lengths(self, column: str) -> npt.NDArray[np.int32]: ...

    def values(self, column: str) -> npt.NDArray[Any]: ...


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
        found = self._rows_of(epoch, random)
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

    def _rows_of(self, epoch: int, random: np.random.Generator) -> npt.NDArray[np.int64]:
        """Return the rows of an epoch, in random order."""
        del epoch
        return random.permutation(self.rows)
