"""Importance and partial dependence of an ensemble are those that its models give by hand."""

from __future__ import annotations

import json

import mlflow
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.datasets import load_diabetes
from sklearn.inspection import partial_dependence, permutation_importance
from sklearn.linear_model import Ridge
from sklearn.metrics import log_loss

from steadytrain.components.automl.calibration import Calibration
from steadytrain.components.automl.ensemble import OutOfFold
from steadytrain.components.automl.explanation import explanation_of
from steadytrain.components.tabular.encoder import FEATURES
from steadytrain.components.tabular.explained import explain
from steadytrain.components.tabular.learners.ensemble import TableEnsembleLearner
from steadytrain.components.tabular.model import LinearModel, Preparation, TableModel
from steadytrain.components.tabular.scoring import TablePackager

from support.stores import copy_store
from support.tables import prepared, shipped

LABELS, PLAIN = ["no", "yes"], Calibration()


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


def out_of_fold(chances, classes):
    rows = np.arange(len(classes))
    own = np.stack([each[rows, classes] for each in chances])
    return OutOfFold(own, None, rows, np.zeros(len(rows), int), chances, classes)


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
    ours = explanation_of(parts, {0: 3, 1: 1}, found, [(str(n), 0) for n in range(200)], PLAIN)
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
    ours = explanation_of(
        parts, {0: 1, 1: 1}, found, [(str(n), n // 100) for n in range(200)], PLAIN
    )
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
    assert np.array(part.shuffled["bmi"]) == pytest.approx(
        np.tile([1 - chance, chance], (200, 1)), rel=1e-5
    )
    classes = (truth == "yes").astype(int)
    found = out_of_fold([np.tile([1 - chance, chance], (200, 1))], classes)
    ours = explanation_of({0: [part]}, {0: 1}, found, [(str(n), 0) for n in range(200)], PLAIN)
    assert [item.loss for item in ours.importances] == pytest.approx([0, 0], abs=1e-5)


class Sums(TableModel):
    """A perfect model of numbers that are all large."""

    def raw(self, matrix):
        return 1.7e9 + 1000 * matrix[:, :1]


def test_large_numbers_are_explained_by_what_varies_of_them():
    frame = pd.DataFrame(np.random.default_rng(0).normal(size=(200, 2)), columns=["a", "junk"])
    truth = 1.7e9 + 1000 * frame["a"].to_numpy()
    preparation = Preparation({"a": "number", "junk": "number"})
    part = explain(Sums(preparation, [], [0.0]), records(frame, truth), 0)
    rows = np.arange(200)
    found = OutOfFold(truth[None], truth, rows, rows * 0)
    ours = explanation_of({0: [part]}, {0: 1}, found, [(str(n), 0) for n in rows], PLAIN)
    losses = {item.column: item.loss for item in ours.importances}
    assert losses["junk"] == pytest.approx(0, abs=1e-6)
    # Twice the variance, roughly.
    assert losses["a"] == pytest.approx(2 * truth.var(), rel=0.3)
    at, values = ours.dependence["a"].at, ours.dependence["a"].values[:, 0]
    assert values == pytest.approx(1.7e9 + 1000 * np.array(at), abs=1e-3)


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
    assert np.max(part.shuffled["day"]) <= 1
    assert list(part.dependence) == ["x"]


class Registered(ClassifierMixin, BaseEstimator):
    """The model as MLflow serves it, for scikit-learn."""

    def __init__(self, uri=""):
        self.uri = uri

    def fit(self, frame, labels):
        self.classes_, self.fitted_ = np.unique(labels), True
        self.model_ = mlflow.pyfunc.load_model(self.uri)
        return self

    def predict_proba(self, frame):
        found = self.model_.predict(pd.DataFrame(frame, columns=self.feature_names_in_))
        return found[[f"probability_{label}" for label in self.classes_]].to_numpy()

    def predict(self, frame):
        return self.classes_[self.predict_proba(frame).argmax(axis=1)]


@pytest.mark.slow
def test_explanation_is_of_the_calibrated_model_that_is_registered(tmp_path, empty_store):
    frame = shipped("wine")[["alcohol", "flavanoids", "hue", "proline", "target"]]
    members = [
        {"framework": "sklearn", "config": {"model_type": "linear"}, "weight": 3},
        {"framework": "sklearn", "config": {"model_type": "extra_trees"}, "weight": 1},
    ]
    settings = {"model_type": "ensemble", "members": members, "temperature": 2.5}
    more = "training.max_steps=2", "training.load_best_model_at_end=false"
    alone = "model.framework=ensemble", f"model.config={json.dumps(settings)}"
    config, data = prepared(tmp_path, frame, *alone, *more, "training.early_stopping_patience=null")
    learner = TableEnsembleLearner(config, data)
    for _ in members:
        learner.learn((), learning_rate_scale=1.0)
    (tmp_path / "model").mkdir()
    learner.export(tmp_path / "model")
    inputs, truth = frame.drop(columns="target"), frame["target"].to_numpy()
    held = records(inputs, truth)
    mlflow.set_tracking_uri(copy_store(empty_store, tmp_path))
    experiment = mlflow.create_experiment("test", artifact_location=(tmp_path / "a").as_uri())
    with mlflow.start_run(experiment_id=experiment):
        uri = TablePackager(config, data).log_model(
            tmp_path / "model", name="table", records=held, metadata={}
        )
    served = Registered(uri)
    served.feature_names_in_ = np.array(inputs.columns)
    served.fit(inputs, truth)
    mlflow.set_tracking_uri(None)

    classes = np.searchsorted(data.labels, truth)
    rows = [json.loads(text) for text in held[FEATURES].to_pylist()]
    chances = [np.exp(model.outputs(rows)) for model in learner.models]
    parts = {n: [explain(model, held, 0)] for n, model in enumerate(learner.models)}
    ours = explanation_of(
        parts,
        {0: 3, 1: 1},
        out_of_fold(chances, classes),
        [(str(n), 0) for n in range(len(frame))],
        Calibration(2.5),
    )
    for place, name in enumerate(inputs.columns):
        at = ours.dependence[name].at
        theirs = partial_dependence(
            served, inputs[:25], [place], custom_values={place: np.array(at)}, method="brute"
        )["average"]
        assert pytest.approx(theirs, rel=1e-4) == ours.dependence[name].values.T
    order = np.random.default_rng(0)
    theirs = permutation_importance(
        served, inputs, truth, scoring="neg_log_loss", n_repeats=20, random_state=0
    )
    plain = log_loss(truth, served.predict_proba(inputs))
    by_name = {item.column: item.loss for item in ours.importances}
    # Columns are shuffled in their order.
    for name in learner.models[0].preparation.kinds:
        shuffled = inputs.copy()
        shuffled[name] = inputs[name].to_numpy()[order.permutation(len(inputs))]
        exact = log_loss(truth, served.predict_proba(shuffled)) - plain
        assert by_name[name] == pytest.approx(exact, abs=1e-4)
        place = list(inputs.columns).index(name)
        apart = abs(by_name[name] - theirs["importances_mean"][place])
        assert apart < 4 * theirs["importances_std"][place] + 1e-3
