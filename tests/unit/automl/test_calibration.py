"""Probabilities and decisions are calibrated on other records than those that score them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
from sklearn.calibration import CalibratedClassifierCV
from sklearn.datasets import load_breast_cancer, load_digits
from sklearn.frozen import FrozenEstimator
from sklearn.metrics import balanced_accuracy_score, f1_score, log_loss
from sklearn.model_selection import StratifiedKFold, cross_val_predict
from sklearn.naive_bayes import GaussianNB

from steadytrain.components.automl.board import _decided
from steadytrain.components.automl.calibration import (
    Calibration,
    best_calibration,
    curves,
    fitted,
    mixed_chances,
    no_and_yes,
    promised,
    temperature,
    thresholds,
)
from steadytrain.components.automl.ensemble import OutOfFold


def naive_bayes(data, folds=5):
    """Return out-of-fold predictions of a model that is far too sure."""
    inputs, truth = data(return_X_y=True)
    split = StratifiedKFold(folds, shuffle=True, random_state=0)
    chances = cross_val_predict(GaussianNB(), inputs, truth, cv=split, method="predict_proba")
    fold = np.zeros(len(truth), int)
    for number, (_, rows) in enumerate(split.split(inputs, truth)):
        fold[rows] = number
    rows = np.arange(len(truth))
    chances = np.maximum(chances, 1e-15)
    own = chances[None, rows, truth]
    return OutOfFold(own, None, rows, fold, [chances.astype(np.float32)], truth)


class Known:
    """A classifier whose log-probabilities are its inputs."""

    _estimator_type = "classifier"

    def __init__(self, classes):
        self.classes_ = np.arange(classes)

    def __sklearn_tags__(self):
        return GaussianNB().__sklearn_tags__()

    def fit(self, inputs, truth):
        return self

    def decision_function(self, inputs):
        return inputs if inputs.shape[1] > 2 else inputs[:, 1] - inputs[:, 0]

    def predict_proba(self, inputs):
        return np.exp(inputs)

    def predict(self, inputs):
        return inputs.argmax(axis=1)


@pytest.mark.parametrize("data", [load_digits, load_breast_cancer])
def test_temperature_is_scikit_learns(data):
    found = naive_bayes(data)
    chances = found.chances[0].astype(float)
    logs = np.log(np.maximum(chances, 1e-15))
    theirs = CalibratedClassifierCV(
        FrozenEstimator(Known(chances.shape[1])), method="temperature", ensemble=False, cv=2
    ).fit(logs, found.classes)
    ours = Calibration(temperature(chances, found.classes, found.units)).chances(chances)
    assert log_loss(found.classes, ours) == pytest.approx(
        log_loss(found.classes, theirs.predict_proba(logs)), abs=1e-4
    )
    assert log_loss(found.classes, ours) < -np.log(found.predicted[0]).mean() - 0.02


def test_probabilities_that_are_right_stay_as_they_are():
    random = np.random.default_rng(0)
    chances = random.dirichlet([1.0, 1.0, 1.0], 600)
    truth = (random.uniform(size=(600, 1)) > chances.cumsum(axis=1)).sum(axis=1)
    assert temperature(chances, truth, np.arange(600)) == 1


def metric_of(decision):
    if decision == "balanced_accuracy":
        return balanced_accuracy_score
    return lambda truth, decided: f1_score(truth, decided, average="macro")


@pytest.mark.parametrize("decision", ["balanced_accuracy", "macro_f1"])
def test_threshold_of_two_classes_is_the_best_of_all(decision):
    random, metric = np.random.default_rng(1), metric_of(decision)
    truth = (random.uniform(size=300) < 0.1).astype(int)
    score = np.clip(random.normal(0.1 + 0.25 * truth, 0.15), 0.01, 0.99).round(2)
    chances = np.stack([1 - score, score], axis=1)
    decided = Calibration(1.0, thresholds(chances, truth, decision)).decided(chances)
    every = [metric(truth, score > at) for at in np.unique([0, *score, 1])]
    assert metric(truth, decided) == pytest.approx(max(every))
    assert metric(truth, decided) > metric(truth, score > 0.5) + 0.05


@pytest.mark.parametrize("decision", ["balanced_accuracy", "macro_f1"])
def test_weights_of_three_classes_find_what_a_grid_finds(decision):
    random, metric = np.random.default_rng(2), metric_of(decision)
    truth = random.choice(3, 400, p=[0.8, 0.15, 0.05])
    logs = random.normal(0, 1, (400, 3)) + np.log([0.8, 0.15, 0.05]) + 1.5 * np.eye(3)[truth]
    chances = np.exp(logs) / np.exp(logs).sum(axis=1, keepdims=True)
    weights = thresholds(chances, truth, decision)
    grid = np.exp(np.linspace(-1, 5, 20))
    best = max(
        metric(truth, (chances * [1, one, two]).argmax(axis=1)) for one in grid for two in grid
    )
    ours = metric(truth, (chances * weights).argmax(axis=1))
    assert ours > metric(truth, chances.argmax(axis=1))
    assert ours > best - 0.01


@pytest.mark.parametrize("decision", ["likeliest", "balanced_accuracy", "macro_f1"])
def test_promise_is_of_calibrations_that_the_fold_did_not_fit(decision):
    found = naive_bayes(load_breast_cancer)
    promise = promised(found, [], decision)
    for fold in range(5):
        inside = np.flatnonzero(found.fold == fold)
        outside = found.only(np.flatnonzero(found.fold != fold))
        calibration = fitted(outside, {0: 1}, decision)
        chances = calibration.chances(found.chances[0][inside].astype(float))
        truth = found.classes[inside]
        expected = -np.log(chances[np.arange(len(inside)), truth])
        assert promise.losses[inside] == pytest.approx(expected)
        assert promise.decided[inside].tolist() == calibration.decided(chances).tolist()
    assert promise.losses.mean() < promise.uncalibrated.mean()
    # Another truth of a fold changes what others promise, but not what it is decided as.
    other = found.classes.copy()
    other[found.fold == 0] = 1 - other[found.fold == 0]
    changed = promised(
        OutOfFold(found.predicted, None, found.units, found.fold, found.chances, other),
        [],
        decision,
    )
    assert changed.decided[found.fold == 0].tolist() == promise.decided[found.fold == 0].tolist()


def label_sets(records=300):
    """Return out-of-fold predictions of three labels, one of them rare and one hardly learned."""
    random = np.random.default_rng(4)
    flags = random.uniform(size=(records, 3)) < [0.1, 0.4, 0.25]
    yes = np.clip(random.normal(0.15 + flags * [0.3, 0.15, 0.02], 0.1), 0.01, 0.9).round(2)
    chances, truth = no_and_yes(yes).reshape(-1, 2), flags.ravel().astype(int)
    own = chances[None, np.arange(len(truth)), truth]
    units = np.repeat(np.arange(records), 3)
    return OutOfFold(own, None, units, units % 5, [chances.astype(np.float32)], truth, labels=3)


def test_each_label_has_the_best_threshold_of_all():
    found = label_sets()
    calibration = fitted(found, {0: 1}, "macro_f1")
    yes = calibration.chances(mixed_of(found))[:, 1].reshape(-1, 3)
    flags = found.classes.reshape(-1, 3)
    best = [
        max(f1_score(truth, chances >= at) for at in np.unique(chances))
        for truth, chances in zip(flags.T, yes.T, strict=True)
    ]
    decided = calibration.decided(calibration.chances(mixed_of(found)), 3).reshape(-1, 3)
    assert f1_score(flags, decided, average=None) == pytest.approx(best)
    assert np.mean(best) > f1_score(flags, yes >= 0.5, average="macro") + 0.2
    # Without decisions, a label is predicted from a half on.
    assert (Calibration().decided(no_and_yes(yes).reshape(-1, 2), 3) == (yes >= 0.5).ravel()).all()


def test_promise_of_label_sets_is_of_thresholds_that_the_fold_did_not_fit():
    found = label_sets()
    promise = promised(found, [], "macro_f1")
    for fold in range(5):
        inside = np.flatnonzero(found.fold == fold)
        outside = found.only(np.flatnonzero(found.fold != fold))
        calibration = fitted(outside, {0: 1}, "macro_f1")
        chances = calibration.chances(mixed_of(found)[inside])
        assert (promise.decided[inside] == calibration.decided(chances, 3)).all()
    changed = np.where(found.fold == 0, 1 - found.classes, found.classes)
    other = promised(replace(found, classes=changed), [], "macro_f1")
    assert (other.decided == promise.decided)[found.fold == 0].all()
    flags = found.classes.reshape(-1, 3)
    chances = mixed_of(found)[:, 1].reshape(-1, 3)
    table = label_table([np.flatnonzero(row) for row in flags], chances)
    likeliest, decided = _decided(table, promise, "macro_f1")
    honest = f1_score(flags, promise.decided.reshape(-1, 3), average="macro")
    assert decided == pytest.approx(honest)
    whole = fitted(found, {0: 1}, "macro_f1")
    seen = whole.decided(whole.chances(mixed_of(found)), 3).reshape(-1, 3)
    assert likeliest < honest < f1_score(flags, seen, average="macro")


def label_table(labels, chances):
    """Return scores of records with sets of labels, of which none is predicted."""
    count = len(labels)
    columns = {
        "id": [f"{place:032x}" for place in range(count)],
        "group": [None] * count,
        "slice": [None] * count,
        "loss": [0.0] * count,
        "targets": [1] * count,
        "bytes": [0] * count,
        "labels": labels,
        "predictions": [[]] * count,
        "probabilities": list(chances),
        "thresholds": [[0.5] * chances.shape[1]] * count,
    }
    return pa.table(columns)


@pytest.mark.slow
def test_decisions_among_coin_flips_promise_no_more_than_chance():
    random, gains = np.random.default_rng(0), []
    for _ in range(150):
        truth = random.integers(0, 2, 100)
        score = random.uniform(0.3, 0.7, 100)
        chances = np.stack([1 - score, score], axis=1).astype(np.float32)
        own = chances[None, np.arange(100), truth].astype(float)
        found = OutOfFold(own, None, np.arange(100), np.arange(100) % 5, [chances], truth)
        calibration = fitted(found, {0: 1}, "balanced_accuracy")
        seen = calibration.decided(calibration.chances(chances.astype(float)))
        gains.append(
            (
                balanced_accuracy_score(truth, seen) - 0.5,
                balanced_accuracy_score(truth, promised(found, [], "balanced_accuracy").decided)
                - 0.5,
            )
        )
    optimistic, honest = np.mean(gains, axis=0)
    assert optimistic > 0.04
    assert abs(honest) < 0.02


def uneven(rows=4000, *, right=False):
    """Return out-of-fold predictions of two classes with one step, which no temperature fixes."""
    random = np.random.default_rng(3)
    told = random.uniform(0.05, 0.95, rows)
    truth = (random.uniform(size=rows) < (told if right else np.where(told < 0.6, 0.2, 0.8))) * 1
    chances = np.stack([1 - told, told], axis=1)
    own = chances[None, np.arange(rows), truth]
    return OutOfFold(own, None, np.arange(rows), np.arange(rows) % 5, [chances], truth)


def mixed_of(found):
    return found.chances[0].astype(float)


@pytest.mark.parametrize("data", [load_digits, load_breast_cancer])
def test_isotonic_regression_is_that_of_scikit_learn(data):
    inputs, truth = data(return_X_y=True)
    split = StratifiedKFold(5)
    told = cross_val_predict(GaussianNB(), inputs, truth, cv=split, method="predict_proba")
    theirs = CalibratedClassifierCV(GaussianNB(), method="isotonic", cv=split, ensemble=False)
    theirs.fit(inputs, truth)
    plain = GaussianNB().fit(inputs, truth).predict_proba(inputs)
    ours = Calibration(isotonic=curves(told, truth)).chances(plain)
    assert ours == pytest.approx(theirs.predict_proba(inputs), abs=1e-5)
    assert log_loss(truth, np.clip(ours, 1e-6, 1)) < log_loss(truth, plain)


def test_isotonic_regression_is_chosen_where_it_predicts_other_folds_better():
    found = uneven()
    calibration = best_calibration(mixed_of(found), found)
    assert calibration.temperature == 1
    (curve,) = calibration.isotonic
    assert np.interp([0.3, 0.9], curve.at, curve.values) == pytest.approx([0.2, 0.8], abs=0.05)
    assert best_calibration(mixed_of(found)[:900], found.only(np.arange(900))).isotonic == ()
    right = uneven(right=True)
    assert best_calibration(mixed_of(right), right) == Calibration()


def test_promise_is_of_curves_if_all_records_are_enough_for_them():
    # Without a fold, there are 880 of them.
    random, rows = np.random.default_rng(0), np.arange(1100)
    told = random.uniform(size=1100)
    truth = (random.uniform(size=1100) < told**4) * 1
    chances = np.stack([1 - told, told], axis=1)
    found = OutOfFold(chances[None, rows, truth], None, rows, rows % 5, [chances], truth)
    assert fitted(found, {0: 1}, "likeliest").isotonic
    promise, curved = promised(found, [], "likeliest"), 0
    for fold in range(5):
        inside = np.flatnonzero(found.fold == fold)
        outside = found.only(np.flatnonzero(found.fold != fold))
        assert not fitted(outside, {0: 1}, "likeliest").isotonic
        calibration = fitted(outside, {0: 1}, "likeliest", many=True)
        curved += bool(calibration.isotonic)
        known = calibration.chances(mixed_of(found)[inside])
        own = np.maximum(known[np.arange(len(inside)), truth[inside]], 1e-15)
        assert promise.losses[inside] == pytest.approx(-np.log(own))
    assert curved


def test_mean_of_certain_members_is_no_more_than_certain():
    sure = np.tile(np.float32([0.0, 1.0]), (4, 1))
    found = OutOfFold(
        np.ones((6, 4)), None, np.arange(4), np.arange(4), [sure] * 6, np.ones(4, np.int64)
    )
    weights = dict(enumerate([48, 24, 57, 10, 9, 46]))
    assert sum(weight / 194 for weight in weights.values()) > 1
    assert mixed_chances(found, weights).max() == 1


def test_promise_with_isotonic_regression_is_of_curves_that_the_fold_did_not_fit():
    found = uneven()
    promise = promised(found, [], "balanced_accuracy")
    assert promise.losses.mean() < promise.uncalibrated.mean() - 0.05
    for fold in range(5):
        inside = np.flatnonzero(found.fold == fold)
        outside = found.only(np.flatnonzero(found.fold != fold))
        chances = Calibration(isotonic=curves(mixed_of(outside), outside.classes)).chances(
            mixed_of(found)[inside]
        )
        own = chances[np.arange(len(inside)), found.classes[inside]]
        assert promise.losses[inside] == pytest.approx(-np.log(np.maximum(own, 1e-15)))
