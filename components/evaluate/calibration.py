"""Calibration of a classifier, and precision and recall of each class.

The expected calibration error (Guo et al. 2017) is the mean difference between the model's
confidence in its predictions and how often they are right, over bins of equal width.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from steadytrain.components.evaluate.bootstrap import FloatArray, IntArray
from steadytrain.components.evaluate.classes import Classes, LabelSets
from steadytrain.components.shared.records import CalibrationBin

BINS: Final = 15
_CURVES: Final = 12
"""Number of classes whose curves are kept: those with the lowest average precision."""
_POINTS: Final = 100


def calibration_error(classes: Classes, weights: FloatArray) -> FloatArray:
    """Return the expected calibration error, (resamples,).

    Args:
        weights: (resamples, examples), how often each example counts.
    """
    sure, hits, bins = _binned(classes)
    distances = np.zeros((len(sure), BINS))
    distances[np.arange(len(sure)), bins] = hits - sure
    error: FloatArray = np.abs(weights @ distances).sum(axis=1) / weights.sum(axis=1)
    return error


def calibration_bins(classes: Classes) -> list[CalibrationBin]:
    """Return the bins that are not empty, lowest confidence first."""
    sure, hits, bins = _binned(classes)
    return [
        CalibrationBin(
            examples=int((bins == index).sum()),
            confidence=float(sure[bins == index].mean()),
            accuracy=float(hits[bins == index].mean()),
        )
        for index in np.unique(bins)
    ]


def average_precisions(classes: Classes | LabelSets, names: list[str]) -> dict[str, float]:
    """Return the area under each class's precision-recall curve. Skip classes without examples."""
    from sklearn.metrics import average_precision_score

    return {
        name: float(average_precision_score(classes.has(index), probabilities))
        for index, (name, probabilities) in enumerate(
            zip(names, classes.probabilities.T, strict=True)
        )
        if classes.has(index).any()
    }


def precision_recall(
    classes: Classes | LabelSets, names: list[str], averages: dict[str, float]
) -> dict[str, list[tuple[float, float]]]:
    """Return the precision-recall curves of the classes with the lowest average precision.

    Returns:
        By label, points of (recall, precision), recall falling.
    """
    from sklearn.metrics import precision_recall_curve

    curves = {}
    for name in sorted(averages, key=lambda name: averages[name])[:_CURVES]:
        index = names.index(name)
        precision, recall, _ = precision_recall_curve(
            classes.has(index), classes.probabilities[:, index]
        )
        chosen = np.unique(np.linspace(0, len(recall) - 1, _POINTS).round().astype(int))
        curves[name] = [(float(recall[at]), float(precision[at])) for at in chosen]
    return curves


def _binned(classes: Classes) -> tuple[FloatArray, FloatArray, IntArray]:
    """Return each example's confidence, whether its prediction is right (1 or 0), and its bin."""
    sure = classes.probabilities[np.arange(len(classes.label)), classes.prediction]
    hits = (classes.label == classes.prediction).astype(np.float64)
    return sure, hits, np.clip((sure * BINS).astype(np.int64), 0, BINS - 1)
