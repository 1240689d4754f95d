"""Balanced sampling: every class makes up an equal share of each epoch."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import numpy.typing as npt

from steadytrain.components.techniques.order import RowOrder


class BalancedOrder(RowOrder):
    """An order whose epochs have as many rows as there are, in equal shares from every class.

    Each class has its own endless stream of seeded permutations. Rows of rare classes are repeated,
    and every row of a frequent class comes once before any comes again.

    Args:
        values: the class of each row.
    """

    column: ClassVar = "label"

    def __init__(
        self,
        rows: int,
        seed: int,
        lengths: npt.NDArray[np.int32] | None = None,
        batch: int = 1,
        *,
        values: npt.NDArray[np.int64],
    ) -> None:
        super().__init__(rows, seed, lengths, batch)
        self._classes = [np.flatnonzero(values == each) for each in np.unique(values)]

    def _rows_of(self, epoch: int, random: np.random.Generator) -> npt.NDArray[np.int64]:
        drawn = [
            self._stream(number, self._drawn(epoch, number), self._drawn(epoch + 1, number))
            for number in range(len(self._classes))
        ]
        return random.permutation(np.concatenate(drawn))

    def _drawn(self, epoch: int, number: int) -> int:
        """Return the rows drawn from a class before an epoch.

        They add up to whole epochs: the sum of (n + i) // k over i from 0 to k - 1 is n (Hermite).
        """
        return (epoch * self.rows + number) // len(self._classes)

    def _stream(self, number: int, start: int, end: int) -> npt.NDArray[np.int64]:
        """Return the rows of a class from `start` to `end` in its stream."""
        members = self._classes[number]
        size = len(members)
        rounds = range(start // size, -(-end // size))
        rows = [
            members[np.random.default_rng([self.seed, number, each]).permutation(size)]
            for each in rounds
        ]
        stream = np.concatenate(rows) if rows else members[:0]
        return stream[start - rounds.start * size :][: end - start]
