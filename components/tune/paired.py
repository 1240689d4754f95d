"""Means and differences: confidence intervals and p-values that hold for all of them together.

The intervals are Student's t intervals at the level that Bonferroni's inequality gives for several
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
from collections.abc import Sequence
from dataclasses import dataclass


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
