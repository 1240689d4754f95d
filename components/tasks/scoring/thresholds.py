"""From which probability on a label is predicted, for the best F1. Nothing here imports torch."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

HALF: Final = 0.5
LEAST: Final = 10
"""Records with a label that the choice of its threshold needs."""


def best_thresholds(
    truth: NDArray[np.bool_], probabilities: NDArray[np.float64], *, shared: bool
) -> list[float]:
    """Return the threshold of each label with the best F1; HALF for a label with few records.

    Args:
        truth, probabilities: (records, labels).
        shared: return the same threshold for all labels, the one with the best micro F1.
    """
    if shared:
        return [_best_threshold(truth.ravel(), probabilities.ravel())] * truth.shape[1]
    return [
        _best_threshold(mine, chances) if mine.sum() >= LEAST else HALF
        for mine, chances in zip(truth.T, probabilities.T, strict=True)
    ]


def _best_threshold(truth: NDArray[np.bool_], probabilities: NDArray[np.float64]) -> float:
    order = np.argsort(-probabilities, kind="stable")
    ordered = probabilities[order]
    # Records with equal probabilities are all predicted, or none is.
    ends = np.flatnonzero(np.diff(ordered, append=-1.0))
    scores = 2 * np.cumsum(truth[order])[ends] / (ends + 1 + truth.sum())
    between = (ordered[ends] + np.append(ordered[1:], 0.0)[ends]) / 2
    best = between[scores == scores.max()]
    return float(best[np.abs(best - HALF).argmin()])
