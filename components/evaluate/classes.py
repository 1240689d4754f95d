"""A classifier's predictions on the test side: its scores of each class, and its calibration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from steadytrain.components.evaluate.bootstrap import FloatArray, IntArray
from steadytrain.components.shared.records import CalibrationBin

MEASURES: Final = ("precision", "recall", "f1", "support")
"""What scikit-learn's `precision_recall_fscore_support` returns."""


@dataclass(frozen=True)
class Classes:
    """Classified examples.

    label: (examples,), the true class.
    prediction: (examples,), the predicted class.
    probabilities: (examples, classes).
    part: (examples,), the data set of each example, if each has classes of its own.
    """

    label: IntArray
    prediction: IntArray
    probabilities: FloatArray
    part: IntArray | None = None

    def only(self, rows: IntArray) -> Classes:
        """Return some of the examples."""
        return Classes(
            self.label[rows],
            self.prediction[rows],
            self.probabilities[rows],
            None if self.part is None else self.part[rows],
        )

    def has(self, index: int) -> NDArray[np.bool_]:
        """Return whether each example is of a class."""
        result: NDArray[np.bool_] = self.label == index
        return result


def confusion(classes: Classes, count: int) -> list[list[int]]:
    """Return the confusion matrix. Rows are true labels, columns are predictions."""
    from sklearn.metrics import confusion_matrix

    matrix = confusion_matrix(classes.label, classes.prediction, labels=range(count))
    return [[int(cell) for cell in row] for row in matrix]


def per_class(
    classes: Classes, names: list[str], averages: Mapping[str, float]
) -> dict[str, dict[str, float]]:
    """Return precision, recall, f1 and support by label.

    A value is 0 if the class has no predictions or no examples.

    Args:
        averages: average precision by label. It is added for the classes that have one.
    """
    from sklearn.metrics import precision_recall_fscore_support

    columns = precision_recall_fscore_support(
        classes.label, classes.prediction, labels=range(len(names)), zero_division=0
    )
    return by_class(dict(zip(MEASURES, columns, strict=True)), names, averages)


def by_class(
    columns: Mapping[str, Any], names: list[str], averages: Mapping[str, float]
) -> dict[str, dict[str, float]]:
    """Return values by class, from columns of values, (classes,) each.

    Args:
        averages: average precision by class. It is added for the classes that have one.
    """
    return {
        name: {key: float(column[index]) for key, column in columns.items()}
        | ({"average_precision": averages[name]} if name in averages else {})
        for index, name in enumerate(names)
    }


Flags = NDArray[np.bool_]


@dataclass(frozen=True)
class LabelSets:
    """Examples with any number of labels.

    truth, prediction: (examples, labels), which labels an example has, and which are predicted.
    probabilities: (examples, labels).
    thresholds: (labels,), the probability from which on a label is predicted.
    """

    truth: Flags
    prediction: Flags
    probabilities: FloatArray
    thresholds: FloatArray

    @classmethod
    def of(cls, table: pa.Table) -> LabelSets:
        """Read the columns of `Scorer.score`."""
        probabilities = _lists(table, "probabilities").reshape(table.num_rows, -1)
        count = probabilities.shape[1]
        return cls(
            _flags(table, "labels", count),
            _flags(table, "predictions", count),
            probabilities,
            _lists(table, "thresholds").reshape(table.num_rows, -1)[0],
        )

    def only(self, rows: IntArray) -> LabelSets:
        """Return some of the examples."""
        return LabelSets(
            self.truth[rows], self.prediction[rows], self.probabilities[rows], self.thresholds
        )

    def has(self, index: int) -> Flags:
        """Return whether each example has a label."""
        return self.truth[:, index]


def per_label(
    sets: LabelSets, names: list[str], averages: Mapping[str, float]
) -> dict[str, dict[str, float]]:
    """Return precision, recall, f1, support and threshold by label.

    A value is 0 if the label has no predictions or no examples.

    Args:
        averages: average precision by label. It is added for the labels that have one.
    """
    from sklearn.metrics import precision_recall_fscore_support

    columns = precision_recall_fscore_support(sets.truth, sets.prediction, zero_division=0)
    measures = dict(zip(MEASURES, columns, strict=True)) | {"threshold": sets.thresholds}
    return by_class(measures, names, averages)


def _lists(table: pa.Table, column: str) -> FloatArray:
    result: Any = table.column(column).combine_chunks()
    return np.asarray(result.flatten(), dtype=np.float64)


def _flags(table: pa.Table, column: str, count: int) -> Flags:
    flags = np.zeros((table.num_rows, count), dtype=np.bool_)
    lists: list[Any] = table.column(column).to_pylist()
    for row, indices in enumerate(lists):
        flags[row, indices] = True
    return flags


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
