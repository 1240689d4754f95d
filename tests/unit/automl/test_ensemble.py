"""Ensembles are selected greedily, and their promised score is that of other folds."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from sklearn.datasets import load_diabetes, load_wine
from sklearn.ensemble import RandomForestClassifier, RandomForestRegressor
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.model_selection import KFold
from sklearn.neighbors import KNeighborsClassifier, KNeighborsRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from steadytrain.components.automl.board import selection_of
from steadytrain.components.automl.ensemble import (
    ALL,
    BAGGED,
    SINGLE,
    Limit,
    OutOfFold,
    chosen,
    greedy,
    held_out,
    resampled,
    standard_error,
)
from steadytrain.components.shared.config import load


def out_of_fold(data, models, *, classes, folds=4):
    """Return what scikit-learn's models predict for records that they did not learn from."""
    inputs, truth = data(return_X_y=True)
    fold, predicted = np.zeros(len(truth), int), np.zeros((len(models), len(truth)))
    for number, (train, test) in enumerate(
        KFold(folds, shuffle=True, random_state=0).split(inputs)
    ):
        fold[test] = number
        for place, model in enumerate(models):
            fitted = model.fit(inputs[train], truth[train])
            if classes:
                chances = fitted.predict_proba(inputs[test])
                predicted[place, test] = chances[np.arange(len(test)), truth[test]]
            else:
                predicted[place, test] = fitted.predict(inputs[test])
    return OutOfFold(predicted, None if classes else truth, np.arange(len(truth)), fold)


@pytest.fixture(scope="module")
def wine():
    models = [
        make_pipeline(StandardScaler(), LogisticRegression()),
        RandomForestClassifier(20, random_state=0),
        KNeighborsClassifier(9),
    ]
    return out_of_fold(load_wine, models, classes=True)


@pytest.fixture(scope="module")
def diabetes():
    models = [Ridge(0.01), RandomForestRegressor(20, random_state=0), KNeighborsRegressor(15)]
    return out_of_fold(load_diabetes, models, classes=False)


@pytest.fixture(scope="module")
def forecasts(diabetes):
    """The same numbers as forecasts, whose errors are relative to those of a naive one."""
    scale = np.random.default_rng(0).uniform(5, 80, len(diabetes.truth))
    return replace(diabetes, scale=scale)


def by_hand(found, rounds):
    """Select greedily, from the mean of all members of each ensemble."""
    picks = []
    for _ in range(rounds):
        trials = []
        for place in range(len(found.predicted)):
            mean = np.mean([found.predicted[other] for other in [*picks, place]], axis=0)
            loss = (
                -np.log(np.maximum(mean, 1e-15))
                if found.truth is None
                else (mean - found.truth) ** 2
                if found.scale is None
                else abs(mean - found.truth) / found.scale
            )
            trials.append(np.mean(loss))
        picks.append(int(np.argmin(trials)))
    return picks


@pytest.mark.parametrize("data", ["wine", "diabetes", "forecasts"])
def test_each_round_adds_what_improves_the_mean_most(data, request):
    found = request.getfixturevalue(data)
    assert greedy(found, rounds=12) == by_hand(found, 12)


def test_ensemble_of_diabetes_is_better_than_each_of_its_members(diabetes):
    picks = greedy(diabetes)
    ensemble = diabetes.losses(diabetes.mixed(Counter(picks))).mean()
    assert len(set(picks)) > 1
    assert ensemble < diabetes.losses(diabetes.predicted).mean(axis=1).min()


@pytest.mark.parametrize("alone", [0, 1, 2])
def test_configuration_that_no_ensemble_may_have_wins_alone_or_not_at_all(forecasts, alone):
    found = replace(forecasts, alone=frozenset([alone]))
    assert alone not in greedy(found)
    weights = chosen(found)
    assert alone not in weights or weights == Counter([alone])
    # Nothing is better than the truth.
    predicted = found.predicted.copy()
    predicted[alone] = found.truth
    assert chosen(replace(found, predicted=predicted)) == Counter([alone])
    limit = Limit(0.5, np.eye(3)[alone])
    assert alone not in chosen(replace(found, predicted=predicted), [limit])


@pytest.mark.parametrize("data", ["wine", "diabetes", "forecasts"])
def test_smallest_ensemble_within_one_standard_error_of_the_best_wins(data, request):
    found = request.getfixturevalue(data)
    picks, weights = greedy(found), chosen(found)
    size = sum(weights.values())
    assert weights == Counter(picks[:size])
    losses = [found.losses(found.mixed(Counter(picks[:end]))) for end in range(1, 41)]
    best = losses[int(np.argmin([item.mean() for item in losses]))]
    for end, item in enumerate(losses[:size], 1):
        extra = item - best
        noise = extra.std(ddof=1) / math.sqrt(len(extra))
        assert (extra.mean() <= noise + 1e-12) == (end == size)


def corrected(found, selection=ALL):
    """Return predictions by the ensembles that were chosen without the record's fold."""
    mixed = np.full(found.predicted.shape[1], math.nan)
    for inside, _, weights in held_out(found, selection=selection):
        mixed[inside] = found.only(inside).mixed(weights)
    return mixed


@pytest.mark.parametrize("data", ["wine", "diabetes"])
def test_promised_score_is_of_ensembles_that_the_fold_did_not_choose(data, request):
    found = request.getfixturevalue(data)
    expected = np.zeros(found.predicted.shape[1])
    for fold in range(4):
        others = found.fold != fold
        rest = OutOfFold(
            found.predicted[:, others],
            None if found.truth is None else found.truth[others],
            found.units[others],
            found.fold[others],
        )
        weights = chosen(rest)
        for place, weight in weights.items():
            share = weight / sum(weights.values())
            expected[~others] += share * found.predicted[place, ~others]
    assert corrected(found) == pytest.approx(expected)


def test_another_division_does_not_tell_the_choice_about_a_record():
    """Each record has one model that knows it: chosen on its other rows, it would win."""
    random, count = np.random.default_rng(0), 60
    folds = [random.permutation(count) % 4 for _ in range(2)]
    guesses = np.full((5, count), 0.5)
    guesses[1 + folds[0], np.arange(count)] = 0.9
    predicted = np.concatenate([guesses, guesses], axis=1)
    found = OutOfFold(
        predicted, None, np.tile(np.arange(count), 2), np.concatenate([folds[0], 4 + folds[1]])
    )
    for rows in (slice(0, count), slice(count, 2 * count)):
        for fold in np.unique(found.fold[rows]):
            inside = np.flatnonzero(found.fold == fold)
            others = ~np.isin(found.units, found.units[inside])
            assert not {*found.units[others]} & {*found.units[inside]}
            weights = chosen(found.only(np.flatnonzero(others)), selection=SINGLE)
            assert corrected(found, SINGLE)[inside] == pytest.approx(
                found.only(inside).mixed(weights)
            )
    # A row of its own fold in the first division is predicted without what it knows.
    assert corrected(found, SINGLE)[:count] == pytest.approx(np.full(count, 0.5))


def test_choice_among_coin_flips_promises_no_more_than_chance():
    random, gains = np.random.default_rng(0), []
    for _ in range(100):
        # Useless models: the best one looks better than chance on the records that choose it.
        guesses = random.uniform(0.2, 0.8, (100, 100))
        found = OutOfFold(guesses, None, np.arange(100), np.arange(100) % 5)
        chance = found.losses(guesses).mean()
        optimistic = found.losses(found.mixed(chosen(found, selection=SINGLE))).mean()
        promised = found.losses(corrected(found, SINGLE)).mean()
        gains.append((chance - optimistic, chance - promised))
    optimistic, promised = np.mean(gains, axis=0)
    assert optimistic > 0.08
    assert abs(promised) < 0.02


def test_members_keep_limits_together(diabetes):
    costs = np.array([3.0, 2.0, 2.0])
    free = greedy(diabetes)
    assert costs[list(set(free))].sum() > 4
    for most in (2.0, 3.0, 4.0):
        picks = greedy(diabetes, [Limit(most, costs)])
        assert 0 < costs[list(set(picks))].sum() <= most
    assert greedy(diabetes, [Limit(7.0, costs)]) == free
    assert not chosen(diabetes, [Limit(1.0, costs)])


def library(count, *, records=200, seed=0):
    """Return models of two classes whose errors are partly those of all, partly their own."""
    random = np.random.default_rng(seed)
    shared = random.normal(1, 1, records)
    own = shared + random.normal(0, 1, (count, records)) + random.normal(0, 0.05, (count, 1))
    return OutOfFold(1 / (1 + np.exp(-own)), None, np.arange(records), np.arange(records) % 5)


def test_bags_are_choices_on_bootstrap_samples():
    found = library(6)
    random, expected = np.random.default_rng(0), Counter()
    for _ in range(20):
        rows = random.integers(200, size=200)
        sample = found.predicted[:, rows]
        picks = by_hand(replace(found, predicted=sample), 40)
        losses = -np.log([sample[picks[:end]].mean(axis=0) for end in range(1, 41)])
        best = losses[losses.mean(axis=1).argmin()]
        for end, loss in enumerate(losses, 1):
            extra = loss - best
            if extra.mean() <= extra.std(ddof=1) / math.sqrt(len(extra)) + 1e-12:
                expected += Counter(picks[:end])
                break
    assert chosen(found, selection=BAGGED) == expected
    assert len(expected) > len(chosen(found))


def test_a_bootstrap_sample_draws_whole_units():
    units = np.array([4, 7, 4, 9, 9, 9, 1])
    rows = np.arange(7.0)
    found = OutOfFold(rows[None], rows, units, np.zeros(7, int), scale=rows + 1)
    drawn = np.random.default_rng(3).integers(4, size=4)
    sample = resampled(found, np.random.default_rng(3))
    expected = [np.flatnonzero(units == [1, 4, 7, 9][it]) for it in drawn]
    assert sample.truth.tolist() == sample.predicted[0].tolist() == [*np.concatenate(expected)]
    assert sample.units.tolist() == [n for n, part in enumerate(expected) for _ in part]
    assert sample.scale.tolist() == [it + 1 for it in sample.truth]
    many = resampled(library(1, records=6000), np.random.default_rng(0))
    assert len(many.units) == len({*many.units}) == 5000
    groups = replace(library(1, records=6000), units=np.arange(6000) % 12)
    sample = resampled(groups, np.random.default_rng(0))
    assert len(sample.units) == 5000
    assert {*sample.units} == {*range(12)}


def test_members_that_bags_chose_least_leave_until_limits_are_kept():
    found = library(12)
    free = chosen(found, selection=BAGGED)
    most = len(free) - 3
    kept = chosen(found, [Limit(most, np.ones(12))], selection=BAGGED)
    assert most - 3 < len(kept) <= most
    assert sum(kept.values()) > 0.8 * sum(free.values())
    dear = max(free, key=free.get)
    limit = Limit(0.5, np.eye(12)[dear])
    assert dear not in chosen(found, [limit], selection=BAGGED)
    assert not chosen(found, [Limit(0.5, np.ones(12))], selection=BAGGED)


def test_bags_have_nothing_that_no_ensemble_may_have():
    plain = library(6)
    often = max(bags := chosen(plain, selection=BAGGED), key=bags.get)
    found = replace(plain, alone=frozenset([often]))
    predicted = plain.predicted.copy()
    predicted[often] = 0.6
    weights = chosen(replace(found, predicted=predicted), selection=BAGGED)
    assert len(weights) > 1
    assert often not in weights
    predicted[often] = 0.99
    assert chosen(replace(found, predicted=predicted), selection=BAGGED) == Counter([often])


@pytest.mark.parametrize(
    ("sets", "selection"),
    [
        ({}, ALL),
        ({"automl.quality": "best"}, BAGGED),
        ({"automl.quality": "best", "automl.constraints.interpretable": True}, SINGLE),
    ],
)
def test_only_the_best_quality_has_bags(sets, selection):
    assert selection_of(load("tabular", overrides=sets)) == selection


def test_records_of_one_unit_are_no_independent_evidence():
    values = np.repeat([0.0, 1.0, 0.0, 1.0, 1.0, 0.0], 10)
    alone = standard_error(values, np.arange(60))
    assert standard_error(values, np.repeat(np.arange(6), 10)) == pytest.approx(
        np.std([0, 1, 0, 1, 1, 0], ddof=1) / math.sqrt(6)
    )
    assert alone == pytest.approx(values.std(ddof=1) / math.sqrt(60))
