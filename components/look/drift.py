"""How far two data sets are apart, by the population stability index and Jensen-Shannon distance.

Lengths are in order, so they are compared by the population stability index over their bins,
sum((q - p) ln(q / p)), where an empty bin counts as a share of 0.0001. Its usual reading (Siddiqi,
Credit Risk Scorecards, 2006): below 0.1 nothing has moved, from 0.25 on the population is another.
Labels and words have no order: the Jensen-Shannon distance to base 2, the square root of the
divergence of Lin (1991), between 0 and 1; 0.1 is where Evidently's drift detection has its default.

Small data are apart by chance. What chance does is seen in each data set itself: the distance of
its two halves. Only what exceeds that too has moved.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from steadytrain.components.shared.config import RetrainConfig
from steadytrain.components.shared.records import DataProfile

_EMPTY_BIN: Final = 1e-4

Shares = NDArray[np.float64]
Measure = Callable[[Shares, Shares], float]


@dataclass(frozen=True)
class Move:
    """One statistic of the data, then and now.

    value: how far it has moved. limit: from where on that counts.
    chance: the distance that the halves of one data set have; infinite where one is empty.
    """

    what: str
    measure: str
    value: float
    limit: float
    chance: float

    @property
    def moved(self) -> bool:
        return self.value > self.limit and self.value > self.chance

    def __str__(self) -> str:
        return f"{self.what} {self.value:.3f} ({self.measure}, limit {self.limit:g})"


def moves(then: DataProfile, now: DataProfile, limits: RetrainConfig) -> list[Move]:
    """Every statistic that both data sets have."""
    compared: list[tuple[str, str, Measure, float]] = [
        ("lengths", "population stability index", stability_index, limits.max_length_shift),
        ("labels", "Jensen-Shannon distance", js_distance, limits.max_label_shift),
        ("words", "Jensen-Shannon distance", js_distance, limits.max_word_shift),
    ]
    found = []
    for what, name, measure, limit in compared:
        old, new = (np.array(getattr(profile, what), dtype=float) for profile in (then, now))
        if old.sum() and new.sum():
            value = measure(old.sum(axis=0), new.sum(axis=0))
            chance = max(_between_halves(old, measure), _between_halves(new, measure))
            found.append(Move(what, name, value, limit, chance))
    return found


def stability_index(then: Shares, now: Shares) -> float:
    """The population stability index of two histograms over the same bins."""
    p, q = (np.maximum(counts / counts.sum(), _EMPTY_BIN) for counts in (then, now))
    return float(((q - p) * np.log(q / p)).sum())


def js_distance(then: Shares, now: Shares) -> float:
    """The Jensen-Shannon distance of two histograms, to base 2: 0 where equal, at most 1."""
    p, q = then / then.sum(), now / now.sum()
    middle = (p + q) / 2
    divergence = (_relative_entropy(p, middle) + _relative_entropy(q, middle)) / 2
    return float(np.sqrt(max(divergence, 0.0)))


def _relative_entropy(p: Shares, q: Shares) -> float:
    """In bits; where p is 0, the summand is."""
    there = p > 0
    return float((p[there] * np.log2(p[there] / q[there])).sum())


def _between_halves(halves: Shares, measure: Measure) -> float:
    """Infinite where a half is empty: nothing can be told from so little."""
    return measure(halves[0], halves[1]) if halves.sum(axis=1).all() else float("inf")
