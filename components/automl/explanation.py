"""Which columns the winner of a search relies on, from the predictions of the models of its folds.

Everything here is about records of the training side, each predicted by models that did not learn
from it. Their predictions are mixed and calibrated like those of the model that is registered. The
test side has no part in it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from steadytrain.components.automl.calibration import Calibration, mixed_chances, no_and_yes
from steadytrain.components.automl.ensemble import OutOfFold, standard_error, weighted_mean
from steadytrain.components.evaluate.bootstrap import FloatArray
from steadytrain.components.tabular.explained import Explained, Grid

NORMAL: Final = 1.96


@dataclass(frozen=True)
class Importance:
    """How much a column matters.

    loss: by how much the mean loss rises when the column's values are shuffled.
    error: its standard error.
    """

    column: str
    loss: float
    error: float


@dataclass(frozen=True)
class Dependence:
    """The mean prediction by the value of one column.

    at: as in `Grid`.
    values: for each, the probabilities of all classes, or the number: (values, outputs).
    """

    at: Sequence[float] | Sequence[str]
    values: FloatArray


@dataclass(frozen=True)
class Explanation:
    """What the winner relies on.

    importances: the largest first.
    records: that were predicted with shuffled columns.
    dependence: by column, the mean prediction of the winner by its value.
    left_out: columns that were not examined.
    """

    importances: Sequence[Importance]
    records: int
    dependence: Mapping[str, Dependence]
    left_out: int


def explanation_of(
    parts: Mapping[int, Sequence[Explained]],
    weights: Mapping[int, int],
    found: OutOfFold,
    rows: Sequence[tuple[str, int]],
    calibration: Calibration,
) -> Explanation:
    """Return what an ensemble relies on.

    Args:
        parts: by member, what its models of all folds predict when a column changes.
        weights: of the members.
        rows: the record and the fold of each row of `found`.
        calibration: of the ensemble.
    """
    several, each = found.labels > 0, max(1, found.labels)

    def served(mixed: FloatArray) -> FloatArray:
        if not found.chances:
            return mixed
        if not several:
            return calibration.chances(mixed)
        return calibration.chances(no_and_yes(mixed))[..., 1]

    places = {row: index * each for index, row in enumerate(rows)}
    first = next(iter(parts.values()))
    examined = [(record, fold) for fold, part in enumerate(first) for record in part.ids]
    known = found.only(
        (np.array([places[row] for row in examined])[:, None] + np.arange(each)).ravel()
    )
    plain = mixed_chances(known, weights) if known.chances else known.mixed(weights)[:, None]
    if several:
        plain = plain[:, 1].reshape(-1, found.labels)

    def losses(mixed: FloatArray) -> FloatArray:
        chances = served(mixed)
        if several:
            chances = no_and_yes(chances).reshape(-1, 2)
        of_truth = known.classes if known.chances else np.zeros(len(chances), np.int64)
        return known.losses(chances[np.arange(len(chances)), of_truth])

    base, importances = losses(plain), list[Importance]()
    for column in first[0].shuffled:
        changed = weighted_mean({n: _shuffled(parts[n], column) for n in weights}, weights)
        more = losses(changed) - base
        error = standard_error(more, known.units)
        importances.append(Importance(column, float(more.mean()), error))
    dependence = dict[str, Dependence]()
    for column, item in first[0].dependence.items():
        values = {n: _values(parts[n][0].dependence[column]) for n in weights}
        dependence[column] = Dependence(
            item.at, served(weighted_mean(values, weights)).mean(axis=1)
        )
    return Explanation(
        sorted(importances, key=lambda item: (-item.loss, item.column)),
        len({record for record, _ in examined}),
        dependence,
        first[0].columns - len(first[0].shuffled),
    )


def _values(grid: Grid) -> FloatArray:
    """Return the predictions: (values, records, outputs)."""
    return np.array(grid.values, dtype=np.float64)


def _shuffled(parts: Sequence[Explained], column: str) -> FloatArray:
    return np.concatenate([part.shuffled[column] for part in parts])
