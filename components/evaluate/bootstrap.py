"""Seeded percentile bootstrap, vectorized: resamples are matrices of weights.

Efron and Tibshirani, An Introduction to the Bootstrap (1993), chapter 13. It resamples units:
single examples, or complete groups of examples that belong together, because examples of one group
are not independent evidence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from steadytrain.components.shared.records import Interval

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

Statistic = Callable[[FloatArray], Mapping[str, FloatArray]]
"""Weights (resamples, examples) -> values (resamples,) by name; NaN if undefined."""

_CELLS = 4_000_000  # weights in memory at a time: 32 MB


@dataclass(frozen=True)
class Resampling:
    """How to compute bootstrap intervals.

    samples: number of resamples.
    confidence: level of the intervals, such as 0.95.
    seed: equal seeds give equal intervals.
    """

    samples: int
    confidence: float
    seed: int

    def interval(self, value: float, replicates: FloatArray) -> Interval:
        """Return the percentile interval around `value`. Leave out replicates that are not finite.

        If no replicate is finite, both ends of the interval are `value`.
        """
        tail = (1 - self.confidence) / 2
        defined = replicates[np.isfinite(replicates)]
        if not len(defined):
            return Interval(value=value, low=value, high=value)
        low, high = np.quantile(defined, [tail, 1 - tail])
        return Interval(value=value, low=float(low), high=float(high))


def units_of(groups: Sequence[str | None]) -> IntArray:
    """Return the unit (0, 1, ...) of each example.

    Examples of one group share a unit. An example without a group is a unit of its own.
    """
    keys = [
        (True, str(index)) if group is None else (False, group)
        for index, group in enumerate(groups)
    ]
    known = {key: code for code, key in enumerate(dict.fromkeys(keys))}
    return np.array([known[key] for key in keys], dtype=np.int64)


def replicate(statistic: Statistic, units: IntArray, how: Resampling) -> dict[str, FloatArray]:
    """Compute `statistic` on resamples of complete units.

    Args:
        units: (examples,), the unit of each example.

    Returns:
        By name, (samples,).
    """
    parts = [statistic(weights) for weights in _weights(units, how)]
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def _weights(units: IntArray, how: Resampling) -> Iterator[FloatArray]:
    """Yield how often each example is drawn, (rows, examples), for a few resamples at a time."""
    random = np.random.default_rng(how.seed)
    count = int(np.max(units)) + 1
    rows_at_once = max(1, _CELLS // len(units))
    for start in range(0, how.samples, rows_at_once):
        rows = min(rows_at_once, how.samples - start)
        drawn = random.integers(count, size=(rows, count)) + np.arange(rows)[:, None] * count
        times = np.bincount(drawn.ravel(), minlength=rows * count).reshape(rows, count)
        yield times[:, units].astype(np.float64)
