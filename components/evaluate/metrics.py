"""The built-in metrics.

Point values come from scikit-learn if it has the metric. For bootstrap intervals, the same metrics
are computed for all resamples at once, with weights. A test checks that both agree.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Final

import numpy as np

from steadytrain.components.evaluate.bootstrap import FloatArray, IntArray
from steadytrain.components.evaluate.classes import Classes, LabelSets, calibration_error
from steadytrain.components.evaluate.metric import MeanMetric, Parts, SampleMetric, Scores

_LARGEST_EXPONENT = 700.0  # e^709 is close to the largest float
_ROUNDING: Final = 1e-26  # of equal numbers' squared deviations, relative to their squares


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


def _column(name: str, scores: Scores) -> Parts | None:
    """Return a column that only some scorers add."""
    if name not in scores.columns:
        return None
    return scores.columns[name], scores.targets


def _preferred(scores: Scores) -> Parts | None:
    margins = _column("margin", scores)
    return margins and ((margins[0] > 0).astype(np.float64), margins[1])


def _exponential(means: FloatArray) -> FloatArray:
    return np.exp(np.minimum(means, _LARGEST_EXPONENT))


def _flags(scores: Scores) -> tuple[FloatArray, FloatArray] | None:
    """Return which classes are true and which predicted, 1 or 0, (examples, classes) each."""
    classes, sets = scores.classes, scores.sets
    if classes is not None:
        one_hot = np.eye(classes.probabilities.shape[1])
        return one_hot[classes.label], one_hot[classes.prediction]
    if sets is not None:
        return sets.truth.astype(np.float64), sets.prediction.astype(np.float64)
    return None


def _macro_f1(scores: Scores) -> float | None:
    from sklearn.metrics import f1_score

    # A class that is neither true nor predicted here has no F1 and is left out of the mean.
    flags = _flags(scores)
    return flags and float(f1_score(*flags, average="macro", zero_division=np.nan))


def _weighted_macro_f1(scores: Scores, weights: FloatArray) -> FloatArray:
    flags = _flags(scores)
    assert flags is not None
    truth, prediction = flags
    f1 = 2 * (weights @ (truth * prediction)) / (weights @ truth + weights @ prediction)
    return _defined_mean(f1.T)


def _micro_f1(scores: Scores) -> float | None:
    from sklearn.metrics import f1_score

    sets = scores.sets
    if sets is None:
        return None
    return float(f1_score(sets.truth, sets.prediction, average="micro", zero_division=0))


def _weighted_micro_f1(scores: Scores, weights: FloatArray) -> FloatArray:
    sets = scores.sets
    assert sets is not None
    hits = (sets.truth & sets.prediction).sum(axis=1)
    seen = sets.truth.sum(axis=1) + sets.prediction.sum(axis=1)
    result: FloatArray = 2 * (weights @ hits) / np.maximum(weights @ seen, 1e-9)
    return result


def _exact_sets(scores: Scores) -> Parts | None:
    if scores.sets is None:
        return None
    exact = (scores.sets.truth == scores.sets.prediction).all(axis=1)
    return exact.astype(np.float64), np.ones(len(exact))


def _wrong_labels(scores: Scores) -> Parts | None:
    if scores.sets is None:
        return None
    wrong = (scores.sets.truth != scores.sets.prediction).mean(axis=1)
    return wrong, np.ones(len(wrong))


def _mean_average_precision(scores: Scores) -> float | None:
    from sklearn.metrics import average_precision_score

    sets = scores.sets
    if sets is None:
        return None
    known = sets.truth.any(axis=0)
    if not known.any():
        return None
    return float(average_precision_score(sets.truth[:, known], sets.probabilities[:, known]))


def _weighted_mean_average_precision(scores: Scores, weights: FloatArray) -> FloatArray:
    sets = scores.sets
    assert sets is not None
    known = np.flatnonzero(sets.truth.any(axis=0)).tolist()
    return _defined_mean(
        _weighted_precision(sets.has(label), sets.probabilities[:, label], weights)
        for label in known
    )


def _label_auroc(sets: LabelSets) -> float | None:
    from sklearn.metrics import roc_auc_score

    told = _told_apart(sets)
    if not told:
        return None
    areas = [roc_auc_score(sets.has(label), sets.probabilities[:, label]) for label in told]
    return float(np.mean(areas))


def _weighted_label_auroc(sets: LabelSets, weights: FloatArray) -> FloatArray:
    return _defined_mean(
        _weighted_area(sets.has(label), sets.probabilities[:, label], weights)
        for label in _told_apart(sets)
    )


def _label_balanced_accuracy(sets: LabelSets) -> float | None:
    if not _told_apart(sets):
        return None
    return float(_weighted_label_balanced_accuracy(sets, np.ones((1, len(sets.truth))))[0])


def _weighted_label_balanced_accuracy(sets: LabelSets, weights: FloatArray) -> FloatArray:
    """Return the mean over the labels of their mean recall of yes and no, (resamples,)."""
    told = _told_apart(sets)
    truth, prediction = sets.truth[:, told], sets.prediction[:, told]
    having = (weights @ (truth & prediction)) / (weights @ truth)
    lacking = (weights @ ~(truth | prediction)) / (weights @ ~truth)
    return _defined_mean(((having + lacking) / 2).T)


def _told_apart(sets: LabelSets) -> list[int]:
    """Return the labels that some examples have and others have not."""
    result: list[int] = np.flatnonzero(sets.truth.any(axis=0) & ~sets.truth.all(axis=0)).tolist()
    return result


def _weighted_precision(truth: np.ndarray, score: FloatArray, weights: FloatArray) -> FloatArray:
    """Return the average precision, (resamples,)."""
    order = np.argsort(-score, kind="stable")
    # Examples with equal scores are all above a threshold, or none is.
    ends = np.flatnonzero(np.diff(score[order], append=-np.inf))
    hits = (weights[:, order] * truth[order]).cumsum(axis=1)[:, ends]
    precision = hits / weights[:, order].cumsum(axis=1)[:, ends]
    gained = np.diff(hits, axis=1, prepend=0)
    result: FloatArray = (np.where(gained > 0, precision, 0) * gained).sum(axis=1) / hits[:, -1]
    return result


def _ece(classes: Classes) -> float:
    return float(calibration_error(classes, np.ones((1, len(classes.label))))[0])


def _auroc(classes: Classes) -> float | None:
    from sklearn.metrics import roc_auc_score

    return _mean_of_classes(roc_auc_score, classes)


def _weighted_auroc(classes: Classes, weights: FloatArray) -> FloatArray:
    return _weighted_mean_of_classes(_weighted_area, classes, weights)


def _average_precision(classes: Classes) -> float | None:
    from sklearn.metrics import average_precision_score

    return _mean_of_classes(average_precision_score, classes)


def _weighted_average_precision(classes: Classes, weights: FloatArray) -> FloatArray:
    return _weighted_mean_of_classes(_weighted_precision, classes, weights)


def _mean_of_classes(
    measure: Callable[[np.ndarray, FloatArray], float], classes: Classes
) -> float | None:
    """Return the mean over the classes of what their ranking of the examples is worth."""
    means = [
        np.mean([measure(part.label == index, part.probabilities[:, index]) for index in ranked])
        for part, _, ranked in _ranked_classes(classes)
    ]
    return float(np.mean(means)) if means else None


def _weighted_mean_of_classes(
    measure: Callable[[np.ndarray, FloatArray, FloatArray], FloatArray],
    classes: Classes,
    weights: FloatArray,
) -> FloatArray:
    """Return the same for each row of weights: (resamples,)."""
    means = [
        _defined_mean(
            measure(part.label == index, part.probabilities[:, index], weights[:, rows])
            for index in ranked
        )
        for part, rows, ranked in _ranked_classes(classes)
    ]
    return _defined_mean(means)


def _balanced_accuracy(classes: Classes) -> float:
    return float(_weighted_balanced_accuracy(classes, np.ones((1, len(classes.label))))[0])


def _weighted_balanced_accuracy(classes: Classes, weights: FloatArray) -> FloatArray:
    """Return the mean of the recalls of the classes that occur, (resamples,)."""
    truth = np.eye(classes.probabilities.shape[1])[classes.label]
    hits = (classes.label == classes.prediction)[:, None] * truth
    with np.errstate(invalid="ignore"):
        return _defined_mean(((weights @ hits) / (weights @ truth)).T)


def _defined_mean(values: Iterable[FloatArray]) -> FloatArray:
    """Return the mean of values, (resamples,) each, without those that are undefined (NaN)."""
    result = np.stack(list(values))
    defined = ~np.isnan(result)
    mean: FloatArray = np.where(defined, result, 0).sum(axis=0) / defined.sum(axis=0)
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
    of_sets: Callable[[LabelSets], float | None] | None = None,
    sets_at_once: Callable[[LabelSets, FloatArray], FloatArray] | None = None,
) -> SampleMetric:
    """Return a metric of classified examples, and of sets of labels if it has one."""

    def value(scores: Scores) -> float | None:
        if scores.classes is not None:
            return of(scores.classes)
        return of_sets(scores.sets) if of_sets and scores.sets is not None else None

    def resampled(scores: Scores, weights: FloatArray) -> FloatArray:
        if scores.classes is not None:
            return at_once(scores.classes, weights)
        assert sets_at_once is not None
        assert scores.sets is not None
        return sets_at_once(scores.sets, weights)

    return SampleMetric(greater_is_better, value, resampled)


def _of_numbers(
    at_once: Callable[[FloatArray, FloatArray, FloatArray], FloatArray],
) -> SampleMetric:
    """Return a metric of predicted numbers.

    Args:
        at_once: takes targets and predictions, (examples,) each, and weights (resamples, examples).
    """

    def resampled(scores: Scores, weights: FloatArray) -> FloatArray:
        return at_once(scores.columns["target"], scores.columns["predicted"], weights)

    def of(scores: Scores) -> float | None:
        if "predicted" not in scores.columns:
            return None
        with np.errstate(invalid="ignore", divide="ignore"):
            (value,) = resampled(scores, np.ones((1, len(scores.id))))
        return None if np.isnan(value) else float(value)

    return SampleMetric(True, of, resampled)


def _explained(targets: FloatArray, predicted: FloatArray, weights: FloatArray) -> FloatArray:
    return 1 - (weights @ np.square(targets - predicted)) / _spread(targets, weights)[0]


def _correlation(one: FloatArray, other: FloatArray, weights: FloatArray) -> FloatArray:
    """Return Pearson's correlation, (resamples,).

    Args:
        one, other: (examples,) or (resamples, examples).
    """
    (spread, deviations), (other_spread, other_deviations) = (
        _spread(item, weights) for item in (one, other)
    )
    covariance: FloatArray = (weights * deviations * other_deviations).sum(axis=1)
    return covariance / np.sqrt(spread * other_spread)


def _rank_correlation(
    targets: FloatArray, predicted: FloatArray, weights: FloatArray
) -> FloatArray:
    return _correlation(_ranks(targets, weights), _ranks(predicted, weights), weights)


def _spread(values: FloatArray, weights: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return the sum of squared deviations, (resamples,), NaN if it is rounding; and deviations.

    Args:
        values: (examples,) or (resamples, examples).
    """
    mean = (weights * values).sum(axis=1) / weights.sum(axis=1)
    deviations = values - mean[:, None]
    variance = (weights * deviations**2).sum(axis=1)
    size = (weights * values**2).sum(axis=1)
    return np.where(variance > _ROUNDING * size, variance, np.nan), deviations


def _ranks(values: FloatArray, weights: FloatArray) -> FloatArray:
    """Return the rank of each example in each resample, (resamples, examples). Ties share one."""
    _, places = np.unique(values, return_inverse=True)
    totals = np.stack([np.bincount(places, row) for row in weights])
    ranks: FloatArray = np.cumsum(totals, axis=1) - (totals - 1) / 2
    return ranks[:, places]


# pyproject.toml registers these names as entry points, like the metrics of other packages.
LOSS: Final = MeanMetric(False, _nats)
PERPLEXITY: Final = MeanMetric(False, _nats_of_text, _exponential)
BITS_PER_BYTE: Final = MeanMetric(False, _bits)
PREFERENCE_ACCURACY: Final = MeanMetric(True, _preferred)
PREFERENCE_MARGIN: Final = MeanMetric(True, partial(_column, "margin"))
RECALL_AT_1: Final = MeanMetric(True, partial(_column, "first"))
MEAN_RECIPROCAL_RANK: Final = MeanMetric(True, partial(_column, "reciprocal_rank"))
ACCURACY: Final = MeanMetric(True, _hits)
MACRO_F1: Final = SampleMetric(True, _macro_f1, _weighted_macro_f1)
MICRO_F1: Final = SampleMetric(True, _micro_f1, _weighted_micro_f1)
SUBSET_ACCURACY: Final = MeanMetric(True, _exact_sets)
HAMMING_LOSS: Final = MeanMetric(False, _wrong_labels)
MEAN_AVERAGE_PRECISION: Final = SampleMetric(
    True, _mean_average_precision, _weighted_mean_average_precision
)
AUROC: Final = _of_classes(True, _auroc, _weighted_auroc, _label_auroc, _weighted_label_auroc)
AVERAGE_PRECISION: Final = _of_classes(True, _average_precision, _weighted_average_precision)
BALANCED_ACCURACY: Final = _of_classes(
    True,
    _balanced_accuracy,
    _weighted_balanced_accuracy,
    _label_balanced_accuracy,
    _weighted_label_balanced_accuracy,
)
MSE: Final = MeanMetric(False, partial(_column, "squared_error"))
RMSE: Final = MeanMetric(False, partial(_column, "squared_error"), np.sqrt)
MAE: Final = MeanMetric(False, partial(_column, "absolute_error"))
MASE: Final = MeanMetric(False, partial(_column, "scaled_error"))
SMAPE: Final = MeanMetric(False, partial(_column, "symmetric_error"))
PINBALL: Final = MeanMetric(False, partial(_column, "pinball"))
R2: Final = _of_numbers(_explained)
PEARSON: Final = _of_numbers(_correlation)
SPEARMAN: Final = _of_numbers(_rank_correlation)
ECE: Final = _of_classes(False, _ece, calibration_error)
