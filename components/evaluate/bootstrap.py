"""Confidence intervals: the percentile bootstrap, and the studentized one of a difference."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np
import numpy.typing as npt

from steadytrain.components.shared.records import Interval

# Seeded percentile bootstrap, vectorized: resamples are matrices of weights.
#
# Efron and Tibshirani, An Introduction to the Bootstrap (1993), chapter 13. It resamples units:
# single examples, or complete groups of examples that belong together, because examples of one
# group are not independent evidence.

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

Statistic = Callable[[FloatArray], Mapping[str, FloatArray]]
"""Weights (resamples, examples) -> values (resamples,) by name; NaN if undefined."""

_CELLS: Final = 4_000_000  # weights in memory at a time: 32 MB


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


# The interval of a difference between two models that decides whether it can be chance.
#
# The percentile bootstrap and BCa are too narrow for few units: with 30, they call noise an
# improvement in 3 to 6 % of the comparisons instead of 2.5 %. Student's t keeps its level for
# heavy tails. For skewed differences it does not, so each end is the farther one of Student's t
# and of the same corrected for skewness (Hall, On the Removal of Skewness by Transformation,
# 1992). A sample that misses the long tail looks less skewed than it is, so the skewness counts as
# one standard error worse. Small levels need no more work than large ones.
#
# Any metric becomes a mean over units by the jackknife: a unit's pseudo-value says how much it
# moves the metric (Efron and Tibshirani, An Introduction to the Bootstrap, 1993, chapter 11). For
# a mean, the pseudo-values are the values themselves. One unit says little about a median, so the
# standard error is at least the one that random halves of the units give, which is right for
# quantiles as well (Shao and Wu, A General Theory for Jackknife Variance Estimation, 1989).

_BLOCKS: Final = 1000
"""Most values of a jackknife. More units than this are left out in blocks of several."""
_SYMMETRIC: Final = 1e-6
"""Skewness below which the correction is rounding."""
_HALVES: Final = 1000
_LUCK: Final = 1.1
"""How much larger the standard error of halves must be to count: several times its own error."""
_LEAST_CHANCE: Final = 2.0**-53
"""1 minus the largest number below 1. A level that rounds to 1 counts as that number."""


def fewest_units(confidence: float) -> int:
    """Return the number of units below which even a unanimous result can be chance.

    With fewer, a sign test could not reach this confidence.
    """
    return math.ceil(math.log2(2 / _chance(confidence)))


def count_units(units: IntArray) -> int:
    """Return the number of units, without the negative ones, which `studentized` skips too."""
    return len(np.unique(units[units >= 0]))


def studentized(statistic: Statistic, units: IntArray, confidence: float) -> dict[str, Interval]:
    """Return the value of each statistic over all examples, with its interval.

    The ends are NaN with fewer than two units, if a value is infinite, or if a statistic is
    undefined without one of the units, because it then rests on that unit.

    Args:
        statistic: of weights (rows, examples), as for the bootstrap.
        units: (examples,), the unit of each example. Examples with a negative one are in every
            sample and are no evidence.
        confidence: level of the interval, such as 0.95.
    """
    without, halves = _values(statistic, _left_out(units)), _values(statistic, _halves(units))
    return {
        name: _interval(values[0], values[1:], halves[name], confidence)
        for name, values in without.items()
    }


_BISECTIONS: Final = 60


def studentized_ratio(statistic: Statistic, units: IntArray, confidence: float) -> Interval:
    """Return the ratio `gain` / `scale` over all examples, with its interval.

    A ratio lies in it if `gain` minus that ratio times `scale` is 0 within noise (Fieller 1954).
    The interval of the quotient itself is too wide for few units, because a small scale in some
    samples makes a skewed quotient. It is what remains if the scale can be 0 by chance.

    Args:
        statistic: of weights (rows, examples), with the two names.
        units, confidence: as in `studentized`.
    """
    without, halves = _values(statistic, _left_out(units)), _values(statistic, _halves(units))
    gain, scale = without["gain"], without["scale"]
    with np.errstate(all="ignore"):
        ratio = float(gain[0] / scale[0])
        quotients, halved = gain[1:] / scale[1:], halves["gain"] / halves["scale"]

    def away(ratio: float) -> Interval:
        residuals, half = (item["gain"] - ratio * item["scale"] for item in (without, halves))
        return _interval(residuals[0], residuals[1:], half, confidence)

    if not math.isfinite(ratio) or not math.isfinite(away(ratio).low):
        return Interval(value=ratio, low=math.nan, high=math.nan)
    if not _interval(scale[0], scale[1:], halves["scale"], confidence).low > 0:
        return _interval(ratio, quotients, halved, confidence)
    return Interval(
        value=ratio,
        low=_last(lambda end: not away(end).low > 0, ratio, -1),
        high=_last(lambda end: not away(end).high < 0, ratio, 1),
    )


def _last(inside: Callable[[float], bool], start: float, sign: int) -> float:
    """Return the value farthest from `start` in a direction up to which all are inside."""
    step = 1e-6 * max(1.0, abs(start))
    while inside(start + sign * step):
        step *= 2
        if not math.isfinite(step):
            return start + sign * step
    known, beyond = 0.0, step
    for _ in range(_BISECTIONS):
        middle = (known + beyond) / 2
        known, beyond = (middle, beyond) if inside(start + sign * middle) else (known, middle)
    return start + sign * beyond


def _values(statistic: Statistic, weights: Iterator[FloatArray]) -> dict[str, FloatArray]:
    parts = [statistic(rows) for rows in weights]
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def infinite_for_one(one: FloatArray, other: FloatArray, compared: FloatArray) -> FloatArray:
    """Return a comparison of two models that is infinite where only one of them has a value.

    Args:
        one, other: (rows,), each model's metric; NaN if it is undefined.
        compared: (rows,), the comparison.
    """
    result: FloatArray = np.where(np.isnan(one) ^ np.isnan(other), np.inf, compared)
    return result


def _left_out(units: IntArray) -> Iterator[FloatArray]:
    """Yield weights, (rows, examples): first all ones, then without one block of units each."""
    blocks, count = _blocks(units)
    yield np.ones((1, len(units)))
    rows = max(1, _CELLS // len(units))
    for start in range(0, count, rows):
        without = np.arange(start, min(start + rows, count))
        yield (blocks != without[:, None]).astype(np.float64)


def _halves(units: IntArray) -> Iterator[FloatArray]:
    """Yield weights, (rows, examples), of the larger halves of the blocks, drawn at random."""
    blocks, count = _blocks(units)
    kept, rows = _drawn(count), max(1, _CELLS // len(units))
    for start in range(0, _HALVES, rows):
        yield kept[start : start + rows, blocks].astype(np.float64)


@lru_cache(maxsize=1)
def _drawn(count: int) -> np.ndarray:
    """Return which blocks are in each half. The last column is of examples that are in all."""
    places = np.tile(np.arange(count), (_HALVES, 1))
    places = np.random.default_rng(0).permuted(places, axis=1)
    always = np.ones((_HALVES, 1), dtype=bool)
    return np.hstack([places < count - count // 2, always])


def _blocks(units: IntArray) -> tuple[IntArray, int]:
    """Return the block of each example, -1 for those that are in every sample, and their number."""
    counted = units >= 0
    blocks = np.full(len(units), -1)
    blocks[counted] = np.unique(units[counted], return_inverse=True)[1] % _BLOCKS
    return blocks, int(blocks.max(initial=-1)) + 1


def _interval(value: float, without: FloatArray, halves: FloatArray, confidence: float) -> Interval:
    from scipy import special

    value, count = float(value), len(without)
    nowhere = Interval(value=value, low=math.nan, high=math.nan)
    if count < 2 or not np.isfinite([value, *without]).all():
        return nowhere
    pseudo = count * value - (count - 1) * without
    deviations = pseudo - pseudo.mean()
    spread = float(np.sqrt(np.mean(deviations**2)))
    if not math.isfinite(spread):
        return nowhere
    error, dropped = spread / math.sqrt(count - 1), count // 2
    halves = halves[np.isfinite(halves)]
    if halves.size:
        of_halves = float(np.std(halves)) * math.sqrt((count - dropped) / dropped)
        error = of_halves if of_halves > _LUCK * error else error
    quantile = -float(special.stdtrit(count - 1, _chance(confidence) / 2))
    skewness = float(np.mean((deviations / spread) ** 3)) if spread else 0.0
    return Interval(
        value=value,
        low=value - error * _farther(quantile, skewness, count),
        high=value + error * _farther(quantile, -skewness, count),
    )


def _chance(confidence: float) -> float:
    return max(1 - confidence, _LEAST_CHANCE)


def _farther(quantile: float, skewness: float, count: int) -> float:
    """Return the distance to the lower end in standard errors, at least `quantile`."""
    size = min((skewness - math.sqrt(6 / count)) / math.sqrt(count), -_SYMMETRIC)
    # Hall's transformation T + size T^2 / 3 + size^2 T^3 / 27 + size / 6, solved for T.
    corrected = 3 * (float(np.cbrt(1 + size * (quantile - size / 6))) - 1) / size
    return max(quantile, corrected)
