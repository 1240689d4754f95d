"""Measure how far two data sets differ: population stability index and Jensen-Shannon distance.

Lengths have an order, so they are compared by the population stability index over their bins,
sum((q - p) ln(q / p)). An empty bin counts as a share of 0.0001. The usual reading (Siddiqi, Credit
Risk Scorecards, 2006): below 0.1 nothing has shifted, and at 0.25 or above the population is
different. Labels and words have no order, so they are compared by the Jensen-Shannon distance to
base 2, the square root of the divergence of Lin (1991). It is between 0 and 1. The default
threshold in Evidently's drift detection is 0.1.

Small data sets differ by chance. The distance between the two halves of each data set shows by how
much. A statistic has moved only if it exceeds that distance too.
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

    value: how far it has moved.
    limit: a larger value counts as moved.
    chance: the distance between the halves of one data set, the larger of the two; infinite if a
        half is empty.
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
    """Compare every statistic that both data sets have."""
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
    """Return the population stability index of two histograms over the same bins."""
    p, q = (np.maximum(counts / counts.sum(), _EMPTY_BIN) for counts in (then, now))
    return float(((q - p) * np.log(q / p)).sum())


def js_distance(then: Shares, now: Shares) -> float:
    """Return the Jensen-Shannon distance of two histograms, to base 2: 0 if equal, at most 1."""
    p, q = then / then.sum(), now / now.sum()
    middle = (p + q) / 2
    divergence = (_relative_entropy(p, middle) + _relative_entropy(q, middle)) / 2
    return float(np.sqrt(max(divergence, 0.0)))


def _relative_entropy(p: Shares, q: Shares) -> float:
    """Return the relative entropy in bits. Terms with p = 0 are 0."""
    there = p > 0
    return float((p[there] * np.log2(p[there] / q[there])).sum())


def _between_halves(halves: Shares, measure: Measure) -> float:
    """Return the distance between the halves, or infinity if one is empty."""
    return measure(halves[0], halves[1]) if halves.sum(axis=1).all() else float("inf")
