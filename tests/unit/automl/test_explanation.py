"""Importance and partial dependence of an ensemble are those that its models give by hand."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from sklearn.datasets import load_diabetes
from sklearn.inspection import partial_dependence
from sklearn.linear_model import Ridge

from steadytrain.components.automl.ensemble import OutOfFold
from steadytrain.components.automl.explanation import explanation_of
from steadytrain.components.tabular.encoder import FEATURES
from steadytrain.components.tabular.explained import explain
from steadytrain.components.tabular.model import LinearModel, Preparation, TableModel

LABELS = ["no", "yes"]


def linear(frame, targets, penalty):
    """Return scikit-learn's model of numbers, and the same as an exported one."""
    fitted = Ridge(penalty).fit(frame.to_numpy(), targets)
    preparation = Preparation(dict.fromkeys(frame.columns, "number"))
    width = len(frame.columns)
    model = LinearModel(
        *(preparation, [], [fitted.intercept_]),
        weights=fitted.coef_.reshape(-1, 1),
        fill=np.zeros(width),
        mean=np.zeros(width),
        deviation=np.ones(width),
    )
    return fitted, model


def records(frame, targets, first=0):
    content = [json.dumps(row) for row in frame.to_dict("records")]
    ids = [str(first + n) for n in range(len(frame))]
    return pa.table({"id": ids, FEATURES: content, "label": np.asarray(targets)})


@pytest.fixture(scope="module")
def diabetes():
    frame, targets = load_diabetes(as_frame=True, return_X_y=True)
    frame, targets = frame[["bmi", "s5", "age"]].iloc[:200], targets.to_numpy()[:200]
    return frame.reset_index(drop=True), targets


def test_partial_dependence_of_an_ensemble_is_scikit_learns(diabetes):
    frame, targets = diabetes
    both = [linear(frame, targets, penalty) for penalty in (0.01, 3.0)]
    parts = {n: [explain(model, records(frame, targets), 0)] for n, (_, model) in enumerate(both)}
    predicted = np.stack([fitted.predict(frame.to_numpy()) for fitted, _ in both])
    found = OutOfFold(predicted, targets, np.arange(200), np.zeros(200, int))
    ours = explanation_of(parts, {0: 3, 1: 1}, found, [(str(n), 0) for n in range(200)])
    for name in frame.columns:
        place, at = list(frame.columns).index(name), ours.dependence[name].at
        theirs = [
            partial_dependence(
                fitted, frame.to_numpy()[:25], [place], custom_values={place: np.array(at)}
            )["average"][0]
            for fitted, _ in both
        ]
        expected = 0.75 * theirs[0] + 0.25 * theirs[1]
        assert [row[0] for row in ours.dependence[name].values] == pytest.approx(expected, rel=1e-4)


def test_importance_of_an_ensemble_is_what_shuffling_costs(diabetes):
    frame, targets = diabetes
    both = [linear(frame, targets, penalty) for penalty in (0.01, 3.0)]
    half = [(frame[:100], targets[:100], 0), (frame[100:], targets[100:], 100)]
    parts = {
        n: [explain(model, records(*side), fold) for fold, side in enumerate(half)]
        for n, (_, model) in enumerate(both)
    }
    predicted = np.stack([fitted.predict(frame.to_numpy()) for fitted, _ in both])
    found = OutOfFold(predicted, targets, np.arange(200), np.repeat([0, 1], 100))
    ours = explanation_of(parts, {0: 1, 1: 1}, found, [(str(n), n // 100) for n in range(200)])
    assert [item.column for item in ours.importances][-1] == "age"
    assert ours.records == 200
    # Shuffling an independent column costs 2 w^2 var, less what it has in common with the others.
    random, mean = np.random.default_rng(0), predicted.mean(axis=0)
    for item in ours.importances:
        costs = []
        for _ in range(200):
            changed = frame.to_numpy().copy()
            place = list(frame.columns).index(item.column)
            for rows in (np.arange(100), np.arange(100, 200)):
                changed[rows, place] = changed[random.permutation(rows), place]
            again = np.mean([fitted.predict(changed) for fitted, _ in both], axis=0)
            costs.append(np.mean((again - targets) ** 2 - (mean - targets) ** 2))
        assert abs(item.loss - np.mean(costs)) < 3.5 * np.std(costs) + 1e-9


def test_column_that_no_model_reads_costs_nothing(diabetes):
    frame, _ = diabetes
    frame = pd.DataFrame({"sex": ["f", "m"] * 100, "bmi": frame["bmi"]})
    truth = np.array(LABELS * 100)
    preparation = Preparation({"sex": "category", "bmi": "number"})
    preparation.fit(frame.to_dict("records"))
    model = TableModel(preparation, LABELS, [0.4])
    part = explain(model, records(frame, truth), 0)
    assert part.dependence["sex"].at == ["f", "m"]
    chance = 1 / (1 + np.exp(-0.4))
    own = np.where(truth == "yes", chance, 1 - chance)
    assert part.shuffled["bmi"] == pytest.approx(own, rel=1e-5)
    found = OutOfFold(own[None], None, np.arange(200), np.zeros(200, int))
    ours = explanation_of({0: [part]}, {0: 1}, found, [(str(n), 0) for n in range(200)])
    assert [item.loss for item in ours.importances] == pytest.approx([0, 0], abs=1e-5)


def test_columns_beyond_the_fortieth_are_counted(diabetes):
    frame = pd.DataFrame(np.zeros((30, 43)), columns=[f"x{n}" for n in range(43)])
    preparation = Preparation(dict.fromkeys(frame.columns, "number"))
    part = explain(TableModel(preparation, [], [1.0]), records(frame, np.zeros(30)), 1)
    assert (part.columns, len(part.shuffled), part.dependence) == (43, 40, {})


def test_parts_of_a_date_are_shuffled_together():
    days = [f"2024-{month:02d}-{day:02d}" for month in range(1, 11) for day in range(1, 5)]
    frame = pd.DataFrame({"day": days, "x": np.zeros(40)})
    preparation = Preparation({"day": "date", "x": "number"})

    class Consistent(TableModel):
        def raw(self, matrix):
            # Days since 1970 and the month agree only if they are of one record.
            months = (matrix[:, 0] - 19723) // 30.5 + 1
            return np.abs(months - matrix[:, 1]).reshape(-1, 1)

    part = explain(Consistent(preparation, [], [0.0]), records(frame, np.zeros(40)), 0)
    assert max(part.shuffled["day"]) <= 1
    assert list(part.dependence) == ["x"]
