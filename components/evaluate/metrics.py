"""Metrics of a table of per-example scores.

Point values are scikit-learn's where it has them. The same metrics under
resampling weights are computed for all resamples at once; a test holds the two
equal.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from steadytrain.components.evaluate.bootstrap import (
    FloatArray,
    IntArray,
    Resampling,
    replicate,
    units_of,
)
from steadytrain.components.shared.records import Interval

_LARGEST_EXPONENT = 700.0  # e^709 is the largest float


@dataclass(frozen=True)
class Classes:
    """Classified examples.

    label, prediction: (examples,). probabilities: (examples, classes).
    """

    label: IntArray
    prediction: IntArray
    probabilities: FloatArray


@dataclass(frozen=True)
class Scores:
    """What `Task.score` gives, as arrays of one value an example.

    loss: nats, summed over the example's targets. bytes: of the scored text.
    classes: none where the task has no classes.
    """

    id: list[str]
    loss: FloatArray
    targets: FloatArray
    bytes: FloatArray
    units: IntArray
    slices: list[str | None]
    classes: Classes | None = None

    @classmethod
    def of(cls, table: pa.Table) -> Scores:
        """The scores of a table with the columns of `Task.score`."""

        def numbers(name: str) -> FloatArray:
            return np.asarray(table.column(name).to_numpy(), dtype=np.float64)

        return cls(
            id=[str(item) for item in table.column("id").to_pylist()],
            loss=numbers("loss"),
            targets=numbers("targets"),
            bytes=numbers("bytes"),
            units=units_of(table.column("group").to_pylist()),
            slices=table.column("slice").to_pylist(),
            classes=_classes(table) if "label" in table.column_names else None,
        )

    def only(self, rows: IntArray) -> Scores:
        """The scores of some examples."""
        classes = self.classes and Classes(
            self.classes.label[rows],
            self.classes.prediction[rows],
            self.classes.probabilities[rows],
        )
        return Scores(
            id=[self.id[row] for row in rows],
            loss=self.loss[rows],
            targets=self.targets[rows],
            bytes=self.bytes[rows],
            units=self.units[rows],
            slices=[self.slices[row] for row in rows],
            classes=classes,
        )

    def by_slice(self) -> dict[str, IntArray]:
        """Rows of each slice value, values sorted."""
        values = sorted({value for value in self.slices if value is not None})
        column = np.array([value or "" for value in self.slices], dtype=object)
        defined = np.array([value is not None for value in self.slices])
        return {value: np.flatnonzero(defined & (column == value)) for value in values}

    @property
    def metric(self) -> str:
        """What models are compared by: accuracy, bits_per_byte, or the loss where neither is."""
        if self.classes is not None:
            return "accuracy"
        return "bits_per_byte" if self.bytes.sum() > 0 else "loss"

    def parts(self, metric: str) -> tuple[FloatArray, FloatArray]:
        """Numerators and weights (examples,) of the metric that models are compared by.

        The metric is the sum of the numerators over the sum of the weights.
        """
        if metric == "accuracy" and self.classes is not None:
            hits = self.classes.label == self.classes.prediction
            return hits.astype(np.float64), np.ones(len(hits))
        if metric == "bits_per_byte":
            return self.loss / math.log(2), self.bytes
        return self.loss, self.targets


def measure(scores: Scores, how: Resampling) -> dict[str, Interval]:
    """Every metric that applies, each with its bootstrap interval."""
    values = point_values(scores)
    replicates = replicate(lambda weights: weighted_values(scores, weights), scores.units, how)
    return {name: how.interval(value, replicates[name]) for name, value in values.items()}


def measure_slices(scores: Scores) -> dict[str, dict[str, float]]:
    """By slice value: "examples" and every metric that applies."""
    return {
        value: {"examples": float(len(rows)), **point_values(scores.only(rows))}
        for value, rows in scores.by_slice().items()
    }


def point_values(scores: Scores) -> dict[str, float]:
    """Every metric that applies; those that are undefined here are left out."""
    loss = float(scores.loss.sum() / scores.targets.sum())
    if scores.classes is not None:
        return {"loss": loss, **_class_values(scores.classes)}
    values = {"loss": loss}
    if scores.bytes.sum() > 0:
        values["perplexity"] = math.exp(min(loss, _LARGEST_EXPONENT))
        values["bits_per_byte"] = float(scores.loss.sum() / math.log(2) / scores.bytes.sum())
    return values


def weighted_values(scores: Scores, weights: FloatArray) -> dict[str, FloatArray]:
    """The metrics of `point_values` with each example counted as often as its weight says.

    Args:
        weights: (resamples, examples).

    Returns:
        By name, (resamples,); NaN where undefined.
    """
    with np.errstate(invalid="ignore", divide="ignore"):
        loss = (weights @ scores.loss) / (weights @ scores.targets)
        values = {"loss": loss}
        if scores.classes is not None:
            return values | _weighted_class_values(scores.classes, weights)
        if scores.bytes.sum() > 0:
            values["perplexity"] = np.exp(np.minimum(loss, _LARGEST_EXPONENT))
            values["bits_per_byte"] = weights @ scores.loss / math.log(2) / (weights @ scores.bytes)
        return values


def confusion(classes: Classes, count: int) -> list[list[int]]:
    """Rows are true labels, columns predictions."""
    from sklearn.metrics import confusion_matrix

    matrix = confusion_matrix(classes.label, classes.prediction, labels=range(count))
    return [[int(cell) for cell in row] for row in matrix]


def per_class(classes: Classes, names: list[str]) -> dict[str, dict[str, float]]:
    """By label: precision, recall, f1 and support; 0 where nothing was predicted or true."""
    from sklearn.metrics import precision_recall_fscore_support

    columns = precision_recall_fscore_support(
        classes.label, classes.prediction, labels=range(len(names)), zero_division=0
    )
    keys = ("precision", "recall", "f1", "support")
    return {
        name: {key: float(column[index]) for key, column in zip(keys, columns, strict=True)}
        for index, name in enumerate(names)
    }


def _classes(table: pa.Table) -> Classes:
    probabilities: Any = table.column("probabilities").combine_chunks()
    return Classes(
        label=np.asarray(table.column("label").to_numpy(), dtype=np.int64),
        prediction=np.asarray(table.column("prediction").to_numpy(), dtype=np.int64),
        probabilities=np.asarray(probabilities.flatten(), dtype=np.float64).reshape(
            table.num_rows, -1
        ),
    )


def _class_values(classes: Classes) -> Mapping[str, float]:
    from sklearn.metrics import accuracy_score, f1_score, roc_auc_score

    label, prediction = classes.label, classes.prediction
    count = classes.probabilities.shape[1]
    values = {
        "accuracy": float(accuracy_score(label, prediction)),
        # A class neither true nor predicted here has no F1, and no part in the mean.
        "macro_f1": float(
            f1_score(label, prediction, labels=range(count), average="macro", zero_division=np.nan)
        ),
    }
    areas = [
        roc_auc_score(label == index, classes.probabilities[:, index])
        for index in _ranked_classes(classes)
    ]
    return values | ({"auroc": float(np.mean(areas))} if areas else {})


def _ranked_classes(classes: Classes) -> list[int]:
    """Classes with an area under the ROC curve: some examples are of it, and some are not.

    Of two classes the second is enough, as is usual.
    """
    count = classes.probabilities.shape[1]
    candidates = [1] if count == 2 else range(count)
    return [
        index for index in candidates if 0 < (classes.label == index).sum() < len(classes.label)
    ]


def _weighted_class_values(classes: Classes, weights: FloatArray) -> dict[str, FloatArray]:
    one_hot = np.eye(classes.probabilities.shape[1])
    label, prediction = one_hot[classes.label], one_hot[classes.prediction]
    hits = label * prediction
    true_positives = weights @ hits
    scores = 2 * true_positives / (weights @ label + weights @ prediction)
    defined = np.isfinite(scores)
    values = {
        "accuracy": (weights @ hits.sum(axis=1)) / weights.sum(axis=1),
        "macro_f1": np.where(defined, scores, 0).sum(axis=1) / defined.sum(axis=1),
    }
    ranked = _ranked_classes(classes)
    if ranked:
        areas = [
            _weighted_area(classes.label == index, classes.probabilities[:, index], weights)
            for index in ranked
        ]
        values["auroc"] = np.mean(areas, axis=0)
    return values


def _weighted_area(positive: np.ndarray, score: FloatArray, weights: FloatArray) -> FloatArray:
    """Area under the ROC curve: how often a positive outranks a negative, ties counted half."""
    order = np.argsort(score, kind="stable")
    starts = np.flatnonzero(np.diff(score[order], prepend=-np.inf) > 0)
    sorted_weights, positive = weights[:, order], positive[order]
    positives = np.add.reduceat(sorted_weights * positive, starts, axis=1)
    negatives = np.add.reduceat(sorted_weights * ~positive, starts, axis=1)
    below = np.cumsum(negatives, axis=1) - negatives / 2
    pairs = positives.sum(axis=1) * negatives.sum(axis=1)
    area: FloatArray = (positives * below).sum(axis=1) / pairs
    return area
