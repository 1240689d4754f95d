"""Which columns the winner of a search relies on, from the predictions of the models of its folds.

Everything here is about records of the training side, each predicted by models that did not learn
from it. The test side has no part in it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from steadytrain.components.automl.ensemble import OutOfFold, standard_error, weighted_mean
from steadytrain.components.evaluate.bootstrap import FloatArray
from steadytrain.components.tabular.explained import Dependence, Explained

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
) -> Explanation:
    """Return what an ensemble relies on.

    Args:
        parts: by member, what its models of all folds predict when a column changes.
        weights: of the members.
        rows: the record and the fold of each row of `found`.
    """
    places = {row: place for place, row in enumerate(rows)}
    first = next(iter(parts.values()))
    examined = [(record, fold) for fold, part in enumerate(first) for record in part.ids]
    known = found.only(np.array([places[row] for row in examined]))
    base = known.losses(known.mixed(weights))
    importances = list[Importance]()
    for column in first[0].shuffled:
        changed = weighted_mean({n: _shuffled(parts[n], column) for n in weights}, weights)
        more = known.losses(changed) - base
        error = standard_error(more, known.units)
        importances.append(Importance(column, float(more.mean()), error))
    dependence = {
        column: Dependence(
            at=item.at,
            values=weighted_mean(
                {n: np.array(parts[n][0].dependence[column].values) for n in weights}, weights
            ).tolist(),
        )
        for column, item in first[0].dependence.items()
    }
    return Explanation(
        sorted(importances, key=lambda item: (-item.loss, item.column)),
        len({record for record, _ in examined}),
        dependence,
        first[0].columns - len(first[0].shuffled),
    )


def _shuffled(parts: Sequence[Explained], column: str) -> FloatArray:
    return np.concatenate([part.shuffled[column] for part in parts])
