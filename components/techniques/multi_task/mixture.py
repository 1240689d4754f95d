"""The order of a mixture: the parts of a data set take turns, each as often as its share says.

Each block of BLOCK places holds a fixed number of rows of every part, in an order that depends on
the seed and on the number of the block alone. So a resumed run finds any place without the ones
before it, and the shares are exact in every block. Each part goes through its rows in epochs of its
own, so that none is seen twice before all are seen once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from steadytrain.components.shared.class_names import part_indices
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.techniques.multi_task import MultiTaskConfig
from steadytrain.components.techniques.order import RowOrder

BLOCK: Final = 1 << 16
_STREAM: Final = 0x6D69780A
"""Keeps the draws apart from those of the ordinary order, which also begin with the seed."""


class Mixture:
    """Implements `Order`.

    Args:
        parts: (rows,), the index of each row's part.
        shares: (parts,), how often each is drawn; they add up to 1.
        seed: equal seeds draw equal rows.
    """

    def __init__(
        self, parts: npt.NDArray[np.int64], shares: npt.NDArray[np.float64], seed: int
    ) -> None:
        self.seed = seed
        self._rows = [np.flatnonzero(parts == part) for part in range(len(shares))]
        self._orders = [
            RowOrder(len(rows), _seed_of(seed, part)) for part, rows in enumerate(self._rows)
        ]
        self._counts = largest_remainder(shares, BLOCK)
        self._number = -1
        self._parts = self._places = np.empty(0, dtype=np.int64)

    def take(self, position: int, count: int) -> Sequence[int]:
        """Return the indices of `count` rows of the stream, starting at `position`."""
        return [self._at(place) for place in range(position, position + count)]

    def _at(self, place: int) -> int:
        number, offset = divmod(place, BLOCK)
        if number != self._number:
            self._draw(number)
        part = self._parts[offset]
        (row,) = self._orders[part].take(int(self._places[offset]), 1)
        return int(self._rows[part][row])

    def _draw(self, number: int) -> None:
        """Draw a block: the part of each place, and the place in the part's own stream."""
        random = np.random.default_rng([self.seed, _STREAM, number])
        drawn = np.repeat(np.arange(len(self._counts)), self._counts)
        self._number, self._parts = number, random.permutation(drawn)
        self._places = np.empty(BLOCK, dtype=np.int64)
        for part, count in enumerate(self._counts):
            self._places[self._parts == part] = number * count + np.arange(count)


def largest_remainder(shares: npt.NDArray[np.float64], total: int) -> npt.NDArray[np.int64]:
    """Return whole numbers in proportion to shares, (parts,), which add up to `total`."""
    exact = shares * total
    counts = np.floor(exact).astype(np.int64)
    most = np.argsort(counts - exact, kind="stable")[: total - counts.sum()]
    counts[most] += 1
    return counts


def mixture_of(
    labels: npt.NDArray[np.int32], names: Sequence[str], config: MultiTaskConfig, seed: int
) -> Mixture:
    """Return the configured mixture.

    Args:
        labels: (rows,), the class of each row.
        names: of the classes.

    Raises:
        BadInput: a part's share is so small that it would never be drawn.
    """
    parts, owners = part_indices(names)
    of_rows = np.asarray(owners)[labels]
    sizes = np.bincount(of_rows, minlength=len(parts))
    shares = shares_of(dict(zip(parts, sizes.tolist(), strict=True)), config)
    for name, count in zip(parts, largest_remainder(shares, BLOCK), strict=True):
        if not count:
            raise BadInput(
                f"training.multi_task.sampling = {config.sampling!r}: the part {name!r} has a "
                f"share below 1 in {BLOCK}",
                remedy="give it a larger weight, raise the temperature, or leave it out",
            )
    return Mixture(of_rows, shares, seed)


def shares_of(sizes: Mapping[str, int], config: MultiTaskConfig) -> npt.NDArray[np.float64]:
    """Return how often each part is drawn, (parts,).

    Args:
        sizes: rows of each part.
    """
    if config.sampling == "weights":
        weights = np.array([config.sampling_weights[name] for name in sizes])
    else:
        power = 1 / config.temperature if config.sampling == "temperature" else 1.0
        weights = np.array([float(size) for size in sizes.values()]) ** power
    shares: npt.NDArray[np.float64] = weights / weights.sum()
    return shares


def _seed_of(seed: int, part: int) -> int:
    return int(np.random.SeedSequence([seed, _STREAM, part]).generate_state(1)[0])
