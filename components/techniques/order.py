"""The order of the rows: a stream without end, of which each step takes the next global batch.

The default order is a stream of seeded permutations of all rows: no epoch's tail is dropped. If
rows are padded to the longest one, the rows of a global batch have similar lengths. Within each
pool of GROUPED_BATCHES global batches of the permutation, rows are sorted by length, as in
Transformers' `group_by_length`, and then the batches are shuffled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Protocol, runtime_checkable

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
        return [self._at(index) for index in range(position, position + count)]

    def _at(self, position: int) -> int:
        epoch, offset = divmod(position, self.rows)
        if epoch != self._epoch:
            self._epoch, self._permutation = epoch, self._permute(epoch)
        return int(self._permutation[offset])

    def _permute(self, epoch: int) -> npt.NDArray[np.int64]:
        random = np.random.default_rng([self.seed, epoch])
        result = self._rows_of(epoch, random)
        if self.lengths is None:
            return result
        # The rows before these complete the previous epoch's last batch.
        first = -epoch * self.rows % self.batch
        remaining = result[first:]
        pools = np.arange(len(remaining)) // (self.batch * GROUPED_BATCHES)
        remaining = remaining[np.lexsort((-self.lengths[remaining], pools))]
        whole = len(remaining) // self.batch
        batches = remaining[: whole * self.batch].reshape(whole, self.batch)
        # The incomplete last batch stays last; the next epoch completes it.
        tail = remaining[whole * self.batch :]
        return np.concatenate([result[:first], random.permutation(batches).ravel(), tail])

    def _rows_of(self, epoch: int, random: np.random.Generator) -> npt.NDArray[np.int64]:
        """Return the rows of an epoch, in random order."""
        del epoch
        return random.permutation(self.rows)


BLOCK: Final = 1 << 16
_STREAM: Final = 0x6D69780A
"""Keeps the draws apart from those of the ordinary order, which also begin with the seed."""


class Mixture:
    """The order of several data sets: they take turns, each as often as its share says.

    Each block of BLOCK positions holds a fixed number of rows of every part, in an order that
    depends on the seed and on the number of the block alone. So a resumed run finds any position
    without the ones before it, and the shares are exact in every block. Each part goes through its
    rows in epochs of its own, so that none is seen twice before all are seen once.

    Args:
        parts: (rows,), the index of each row's part.
        shares: (parts,), how often each is drawn; they add up to 1.
        seed: equal seeds draw equal rows.
        names: of the parts, for `undrawn`.
        even: spread each part's positions evenly in a block, as `spread` does, instead of at
            random. Then the shares of any run of positions, such as a global batch, are nearly
            exact too.
    """

    def __init__(
        self,
        parts: npt.NDArray[np.int64],
        shares: npt.NDArray[np.float64],
        seed: int,
        *,
        names: Sequence[str] = (),
        even: bool = False,
    ) -> None:
        self.seed, self.names = seed, names
        self._rows = [np.flatnonzero(parts == part) for part in range(len(shares))]
        self._orders = [
            RowOrder(len(rows), seed_of(seed, part)) for part, rows in enumerate(self._rows)
        ]
        self._counts = largest_remainder(shares, BLOCK)
        self._spread = spread(self._counts) if even else None
        self._number = -1
        self._parts = self._positions = np.empty(0, dtype=np.int64)

    def take(self, position: int, count: int) -> Sequence[int]:
        """Return the indices of `count` rows of the stream, starting at `position`."""
        return [self._at(index) for index in range(position, position + count)]

    def undrawn(self, count: int) -> list[str]:
        """Return a sentence for each part that the first `count` positions have no row of."""
        self._draw(0)
        drawn = set(self._parts[:count].tolist())
        return [
            f"the part {name!r} is not learned: its share is too small for a row in {count:,}"
            for part, name in enumerate(self.names)
            if part not in drawn
        ]

    def _at(self, position: int) -> int:
        number, offset = divmod(position, BLOCK)
        if number != self._number:
            self._draw(number)
        part = self._parts[offset]
        (row,) = self._orders[part].take(int(self._positions[offset]), 1)
        return int(self._rows[part][row])

    def _draw(self, number: int) -> None:
        """Draw a block: the part of each position, and the position in the part's own stream."""
        self._number = number
        if self._spread is None:
            random = np.random.default_rng([self.seed, _STREAM, number])
            drawn = np.repeat(np.arange(len(self._counts)), self._counts)
            self._parts = random.permutation(drawn)
        else:
            self._parts = self._spread
        self._positions = np.empty(BLOCK, dtype=np.int64)
        for part, count in enumerate(self._counts):
            self._positions[self._parts == part] = number * count + np.arange(count)


def largest_remainder(shares: npt.NDArray[np.float64], total: int) -> npt.NDArray[np.int64]:
    """Return whole numbers in proportion to shares, (parts,), which add up to `total`."""
    exact = shares * total
    counts = np.floor(exact).astype(np.int64)
    most = np.argsort(counts - exact, kind="stable")[: total - counts.sum()]
    counts[most] += 1
    return counts


def spread(counts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the part of each position of a block in which each part's positions are evenly spread.

    Occurrence j of a part with count c belongs at (j + 0.5) / c of the block.

    Args:
        counts: (parts,), positions of each.
    """
    moments = [(np.arange(count) + 0.5) / max(1, count) for count in counts]
    parts = np.repeat(np.arange(len(counts)), counts)
    placed: npt.NDArray[np.int64] = parts[np.argsort(np.concatenate(moments), kind="stable")]
    return placed


def seed_of(seed: int, part: int) -> int:
    """Return the seed of a part's own order."""
    return int(np.random.SeedSequence([seed, _STREAM, part]).generate_state(1)[0])
