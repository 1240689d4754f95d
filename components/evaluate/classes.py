"""A classifier's predictions on the examples of the test side."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from steadytrain.components.evaluate.bootstrap import FloatArray, IntArray

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
        found: NDArray[np.bool_] = self.label == index
        return found


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
