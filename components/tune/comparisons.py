"""Comparisons of configurations: intervals and p-values, as rows of text and as a chart.

The confidence intervals and p-values of means and differences hold for all of them together. The
intervals are Student's t intervals at the level that Bonferroni's inequality gives for several
comparisons (Dunn 1961, "Multiple Comparisons Among Means"). The p-values of the t tests are
adjusted by Holm's step-down method (Holm 1979, "A Simple Sequentially Rejective Multiple Test
Procedure"). Both hold however the comparisons depend on each other, as they do if they share a
variant. Holm's method is the stronger one: it may find an effect whose interval still contains 0.

The training sets of a cross-validation overlap, so its scores vary together, and their standard
error is larger than that of independent ones. Nadeau and Bengio (2003, "Inference for the
Generalization Error") correct for it: variance x (1/n + tested/trained).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from markupsafe import Markup

from steadytrain.components.pages.charts import intervals
from steadytrain.components.shared.quantities import number


@dataclass(frozen=True)
class Estimate:
    """The mean of paired differences.

    low, high: ends of the simultaneous confidence interval; None for fewer than two pairs.
    p: Holm's adjusted p-value for "there is no difference"; None for fewer than two pairs.
    """

    mean: float
    low: float | None
    high: float | None
    p: float | None


def estimates(
    differences: Sequence[Sequence[float]], confidence: float, *, overlap: float = 0.0
) -> list[Estimate | None]:
    """Return the estimate of each comparison; None for one without a pair.

    Args:
        differences: for each comparison its differences, one per seed.
        confidence: probability with which all intervals together contain the true means.
        overlap: records tested on over records trained on, if these were parts of the same records;
            0 for independent differences.
    """
    usable = [found for found in differences if len(found) > 1]
    adjusted = iter(holm([_p(found, overlap) for found in usable]))
    made = list[Estimate | None]()
    for found in differences:
        mean = statistics.fmean(found) if found else math.nan
        if len(found) > 1:
            half = _half_width(found, confidence, len(differences), overlap)
            made.append(Estimate(mean, mean - half, mean + half, next(adjusted)))
        else:
            made.append(Estimate(mean, None, None, None) if found else None)
    return made


def holm(values: Sequence[float]) -> list[float]:
    """Return p-values adjusted by Holm's method, in the same order."""
    adjusted, largest = [0.0] * len(values), 0.0
    order = sorted(range(len(values)), key=values.__getitem__)
    for place, index in enumerate(order):
        largest = max(largest, min(1.0, (len(values) - place) * values[index]))
        adjusted[index] = largest
    return adjusted


def _half_width(
    found: Sequence[float], confidence: float, comparisons: int, overlap: float
) -> float:
    # scipy takes half a second to import.
    from scipy.stats import t

    tail = (1 - confidence) / (2 * comparisons)
    return float(t.isf(tail, len(found) - 1)) * _error(found, overlap)


def _p(found: Sequence[float], overlap: float) -> float:
    from scipy.stats import t

    mean, error = statistics.fmean(found), _error(found, overlap)
    if error == 0:
        return 0.0 if mean else 1.0
    return float(2 * t.sf(abs(mean) / error, len(found) - 1))


def _error(found: Sequence[float], overlap: float) -> float:
    """Return the standard error of the mean."""
    return statistics.stdev(found) * math.sqrt(1 / len(found) + overlap)


_VERDICTS: Final = {True: "better", False: "worse", None: "not decided"}
_KINDS: Final = {True: "best", False: "failed", None: "stopped"}
Row = tuple[str, list[str]]
"""A name, and what belongs to it in words."""


class Compared(Protocol):
    """A comparison: the differences, their mean, and whether it is an improvement."""

    @property
    def pairs(self) -> Mapping[int, float]: ...
    @property
    def estimate(self) -> Estimate | None: ...
    @property
    def better(self) -> bool | None: ...


def row(name: str, item: Compared) -> Row:
    """Return a comparison in words: difference, interval, p, number of pairs, and verdict."""
    found, p = item.estimate, ""
    if found and found.p is not None:
        p = "<0.001" if found.p < 1e-3 else f"{found.p:.3f}"
    difference = _signed(found.mean) if found else ""
    ends = interval(found, _signed) if found else ""
    return name, [difference, ends, p, str(len(item.pairs)), _VERDICTS[item.better]]


def chart(title: str, items: Iterable[tuple[str, Compared]]) -> Markup:
    """Draw the interval of each comparison that has one."""
    rows = [
        (name, found.low, found.mean, found.high, _KINDS[item.better])
        for name, item in items
        if (found := item.estimate) and found.low is not None and found.high is not None
    ]
    return intervals(title, rows)


def interval(found: Estimate, show: Callable[[float], str] = number) -> str:
    """Return an interval in words; "" if there is none."""
    if found.low is None or found.high is None:
        return ""
    return f"{show(found.low)} to {show(found.high)}"


def _signed(value: float) -> str:
    return f"+{number(value)}" if value > 0 else number(value)
