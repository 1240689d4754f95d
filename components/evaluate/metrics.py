"""The built-in metrics.

Point values come from scikit-learn if it has the metric. For bootstrap intervals, the same metrics
are computed for all resamples at once, with weights. A test checks that both agree.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Final

import numpy as np

from steadytrain.components.evaluate.bootstrap import FloatArray, IntArray
from steadytrain.components.evaluate.calibration import calibration_error
from steadytrain.components.evaluate.classes import Classes
from steadytrain.components.evaluate.metric import MeanMetric, Parts, SampleMetric
from steadytrain.components.evaluate.scores import Scores

_LARGEST_EXPONENT = 700.0  # e^709 is close to the largest float


def _nats(scores: Scores) -> Parts:
    return scores.loss, scores.targets


def _nats_of_text(scores: Scores) -> Parts | None:
    return _nats(scores) if scores.classes is None and scores.bytes.sum() > 0 else None


def _bits(scores: Scores) -> Parts | None:
    if _nats_of_text(scores) is None:
        return None
    return scores.loss / math.log(2), scores.bytes


def _hits(scores: Scores) -> Parts | None:
    if scores.classes is None:
        return None
    hits = scores.classes.label == scores.classes.prediction
    return hits.astype(np.float64), np.ones(len(hits))


def _margins(scores: Scores) -> Parts | None:
    if "margin" not in scores.columns:
        return None
    return scores.columns["margin"], scores.targets


def _preferred(scores: Scores) -> Parts | None:
    found = _margins(scores)
    return found and ((found[0] > 0).astype(np.float64), found[1])


def _reciprocal_ranks(scores: Scores) -> Parts | None:
    if "reciprocal_rank" not in scores.columns:
        return None
    return scores.columns["reciprocal_rank"], scores.targets


def _first_ones(scores: Scores) -> Parts | None:
    if "first" not in scores.columns:
        return None
    return scores.columns["first"], scores.targets


def _exponential(means: FloatArray) -> FloatArray:
    return np.exp(np.minimum(means, _LARGEST_EXPONENT))


def _macro_f1(classes: Classes) -> float:
    from sklearn.metrics import f1_score

    # A class that is neither true nor predicted here has no F1 and is left out of the mean.
    return float(
        f1_score(
            classes.label,
            classes.prediction,
            labels=range(classes.probabilities.shape[1]),
            average="macro",
            zero_division=np.nan,
        )
    )


def _weighted_macro_f1(classes: Classes, weights: FloatArray) -> FloatArray:
    one_hot = np.eye(classes.probabilities.shape[1])
    label, prediction = one_hot[classes.label], one_hot[classes.prediction]
    scores = 2 * (weights @ (label * prediction)) / (weights @ label + weights @ prediction)
    return _defined_mean(scores.T)


def _ece(classes: Classes) -> float:
    return float(calibration_error(classes, np.ones((1, len(classes.label))))[0])


def _auroc(classes: Classes) -> float | None:
    from sklearn.metrics import roc_auc_score

    means = [
        np.mean(
            [roc_auc_score(part.label == index, part.probabilities[:, index]) for index in ranked]
        )
        for part, _, ranked in _ranked_classes(classes)
    ]
    return float(np.mean(means)) if means else None


def _weighted_auroc(classes: Classes, weights: FloatArray) -> FloatArray:
    means = [
        _defined_mean(
            _weighted_area(part.label == index, part.probabilities[:, index], weights[:, rows])
            for index in ranked
        )
        for part, rows, ranked in _ranked_classes(classes)
    ]
    return _defined_mean(means)


def _defined_mean(values: Iterable[FloatArray]) -> FloatArray:
    """Return the mean of values, (resamples,) each, without those that are undefined (NaN)."""
    found = np.stack(list(values))
    defined = ~np.isnan(found)
    mean: FloatArray = np.where(defined, found, 0).sum(axis=0) / defined.sum(axis=0)
    return mean


def _ranked_classes(classes: Classes) -> Iterator[tuple[Classes, IntArray, list[int]]]:
    """Yield the classes whose area under the ROC curve is defined, of each data set.

    Such a class needs examples that belong to it and examples that do not. With two classes, the
    second one is enough, as is usual. Examples of other data sets would be easy to tell apart.

    Yields:
        A data set's examples, their places among all, and its classes.
    """
    owners = np.zeros(len(classes.label)) if classes.part is None else classes.part
    for owner in np.unique(owners):
        rows = np.flatnonzero(owners == owner)
        part = classes.only(rows)
        count = part.probabilities.shape[1]
        candidates = [1] if count == 2 else range(count)
        ranked = [
            index for index in candidates if 0 < (part.label == index).sum() < len(part.label)
        ]
        if ranked:
            yield part, rows, ranked


def _weighted_area(positive: np.ndarray, score: FloatArray, weights: FloatArray) -> FloatArray:
    """Return the area under the ROC curve, (resamples,).

    It is how often a positive example outranks a negative one. Ties count half.
    """
    order = np.argsort(score, kind="stable")
    starts = np.flatnonzero(np.diff(score[order], prepend=-np.inf) > 0)
    sorted_weights, positive = weights[:, order], positive[order]
    positives = np.add.reduceat(sorted_weights * positive, starts, axis=1)
    negatives = np.add.reduceat(sorted_weights * ~positive, starts, axis=1)
    below = np.cumsum(negatives, axis=1) - negatives / 2
    pairs = positives.sum(axis=1) * negatives.sum(axis=1)
    area: FloatArray = (positives * below).sum(axis=1) / pairs
    return area


def _of_classes(
    greater_is_better: bool,
    of: Callable[[Classes], float | None],
    at_once: Callable[[Classes, FloatArray], FloatArray],
) -> SampleMetric:
    """Return a metric of classified examples."""

    def resampled(scores: Scores, weights: FloatArray) -> FloatArray:
        assert scores.classes is not None
        return at_once(scores.classes, weights)

    return SampleMetric(
        greater_is_better,
        lambda scores: of(scores.classes) if scores.classes is not None else None,
        resampled,
    )


# pyproject.toml registers these names as entry points, like the metrics of other packages.
LOSS: Final = MeanMetric(False, _nats)
PERPLEXITY: Final = MeanMetric(False, _nats_of_text, _exponential)
BITS_PER_BYTE: Final = MeanMetric(False, _bits)
PREFERENCE_ACCURACY: Final = MeanMetric(True, _preferred)
PREFERENCE_MARGIN: Final = MeanMetric(True, _margins)
RECALL_AT_1: Final = MeanMetric(True, _first_ones)
MEAN_RECIPROCAL_RANK: Final = MeanMetric(True, _reciprocal_ranks)
ACCURACY: Final = MeanMetric(True, _hits)
MACRO_F1: Final = _of_classes(True, _macro_f1, _weighted_macro_f1)
AUROC: Final = _of_classes(True, _auroc, _weighted_auroc)
ECE: Final = _of_classes(False, _ece, calibration_error)
