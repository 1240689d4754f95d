"""Which row of a global batch each row is mixed with, and how (`training.mixup`).

Partners and shares depend on the seed and on the number of the global batch alone. So a resumed
run, another world size and a smaller micro-batch mix the same rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

_STREAM: Final = 0x6D697875
"""Keeps the draws apart from those of the order, which also begin with the seed."""


@dataclass(frozen=True)
class Partners:
    """The mixtures of a global batch.

    places: of the partner of each row, within the batch. It may be the row itself.
    shares: of each row in its mixture, from 0 to 1. The rest is its partner's.
    """

    places: Sequence[int]
    shares: Sequence[float]


def partners_of(batch: int, size: int, *, alpha: float, seed: int) -> Partners:
    """Return the mixtures of a global batch: a permutation, and shares from Beta(alpha, alpha).

    Args:
        batch: number of the global batch in the order.
        size: rows in it.
    """
    random = np.random.default_rng([seed, _STREAM, batch])
    places: list[int] = random.permutation(size).tolist()
    shares: list[float] = random.beta(alpha, alpha, size).tolist()
    return Partners(places, shares)
