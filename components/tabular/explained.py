"""What a model of a table predicts when a column changes, for records that it did not learn from.

Breiman 2001, "Random Forests" (permutation importance); Friedman 2001, "Greedy Function
Approximation" (partial dependence). What is kept are the predictions for each record: an ensemble
mixes and calibrates those of its members.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa

from steadytrain.components.shared.records import Record
from steadytrain.components.tabular.encoder import parsed
from steadytrain.components.tabular.model import Preparation, TableModel

_COLUMNS: Final = 40
_PREDICTED: Final = 4000
"""Rows that are predicted with shuffled columns, at least 20 for each column; fewer if there are
more than two classes."""
_FEWEST: Final = 20
_GRID: Final = 8
"""Values of a column that are tried."""
_FOR_GRID: Final = 25
"""Records that get each of them; fewer of many classes, but at least 5."""
_FEWEST_FOR_GRID: Final = 5
_OF_CHANCES: Final = 6
_OF_NUMBERS: Final = 15
"""Digits that are kept of probabilities, and of numbers."""
_MANY: Final = 10
"""Classes from which fewer records get each of them."""


class Grid(Record):
    """What is predicted by the value of one column.

    at: the numbers, or the names of categories, the most frequent first.
    values: for each and each record, the probabilities of all classes, or the number.
    """

    at: list[float] | list[str]
    values: list[list[list[float]]]


class Explained(Record):
    """What a model predicts when a column changes.

    columns: how many columns there are. The first 40 are examined.
    ids: of the records that are predicted with shuffled columns.
    shuffled: by column, the prediction for each of them with the value of another record: the
        probabilities of all classes, or the number.
    dependence: by column of numbers or categories, for records of the first fold.
    """

    columns: int
    ids: list[str]
    shuffled: dict[str, list[list[float]]]
    dependence: dict[str, Grid]


def explain(model: TableModel, records: pa.Table, fold: int) -> Explained:
    """Return what a model predicts when a column changes.

    Args:
        records: that it did not learn from. Equal ones are shuffled alike for all models.
        fold: the number of the fold that they are.
    """
    preparation = model.preparation
    names = list(preparation.kinds)[:_COLUMNS]
    several = max(1, len(model.labels) / 2)
    count = max(_FEWEST, int(_PREDICTED / several) // max(1, len(names)))
    some = records.slice(0, count)
    matrix = preparation.matrix(parsed(some), strict=False)
    return Explained(
        columns=len(preparation.kinds),
        ids=[str(item) for item in some.column("id").to_pylist()],
        shuffled=_shuffled(model, matrix, names, fold) if names else {},
        dependence={
            name: _dependence(model, matrix, name)
            for name in names
            if fold == 0 and preparation.kinds[name] in ("number", "category")
        },
    )


def _shuffled(
    model: TableModel, matrix: Any, names: Sequence[str], fold: int
) -> dict[str, list[list[float]]]:
    # In one call, since each takes some milliseconds whatever it predicts.
    order, changed = np.random.default_rng(fold), np.repeat(matrix[None], len(names), axis=0)
    for rows, name in zip(changed, names, strict=True):
        places = _places(model.preparation, name)
        rows[:, places] = matrix[order.permutation(len(matrix))][:, places]
    predictions = _predicted(model, changed.reshape(-1, matrix.shape[1]))
    each = predictions.reshape(len(names), len(matrix), predictions.shape[1])
    digits = _digits(model)
    return {
        name: [_rounded(row, digits) for row in rows]
        for name, rows in zip(names, each, strict=True)
    }


def _places(preparation: Preparation, name: str) -> list[int]:
    """Return the matrix's columns that hold a column: a date has several."""
    first, after = (
        preparation.places[name],
        [*preparation.places.values(), len(preparation.columns)],
    )
    return list(range(first, min(index for index in after if index > first)))


def _predicted(model: TableModel, matrix: Any) -> Any:
    """Return probabilities (rows, classes), or numbers (rows, 1)."""
    raw = model.raw(matrix)
    return np.exp(model.log_chances(raw)) if model.labels else raw[:, :1]


def _dependence(model: TableModel, matrix: Any, name: str) -> Grid:
    preparation = model.preparation
    fewer = _FOR_GRID * _MANY // max(_MANY, len(model.labels))
    index, some = preparation.places[name], matrix[: max(_FEWEST_FOR_GRID, fewer)]
    if preparation.kinds[name] == "category":
        at: Any = preparation.levels[name][:_GRID]
        grid = np.arange(len(at), dtype=np.float64)
    else:
        present = matrix[:, index][~np.isnan(matrix[:, index])]
        ends = np.linspace(0.02, 0.98, _GRID)
        grid = np.unique(np.quantile(present, ends)) if len(present) else np.zeros(0)
        at = _rounded(grid, _OF_NUMBERS)
    changed = np.repeat(some[None], len(grid), axis=0)
    changed[:, :, index] = grid[:, None]
    predictions = _predicted(model, changed.reshape(-1, matrix.shape[1]))
    each = predictions.reshape(len(grid), len(some), predictions.shape[1])
    digits = _digits(model)
    return Grid(at=at, values=[[_rounded(row, digits) for row in rows] for rows in each])


def _digits(model: TableModel) -> int:
    """Return how many digits of predictions are kept. What varies of a number may be its last."""
    return _OF_CHANCES if model.labels else _OF_NUMBERS


def _rounded(values: Any, digits: int) -> list[float]:
    return [float(f"{value:.{digits}g}") for value in np.asarray(values).tolist()]
