"""Learners of tables agree with scikit-learn and LightGBM, and continue exactly."""

from __future__ import annotations

import os
import re

import lightgbm
import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.metrics import log_loss
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from steadytrain.components.evaluate.scoring import judged_records
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.tabular.learners import read_side, sklearn
from steadytrain.components.tabular.learners.boosting import LightGBMLearner
from steadytrain.components.tabular.learners.sklearn import LinearLearner
from steadytrain.components.tabular.model import load
from steadytrain.components.tabular.scoring import TableNumberScorer
from steadytrain.components.tasks.base import load_task
from steadytrain.components.train.framework import lightgbm as lightgbm_trees

from support.tables import LINEAR, REGRESSION, prepared, shipped

OF = {"cancer": "breast_cancer", "wine": "wine", "diabetes": "diabetes"}


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    """Return a function that prepares a table once, and returns its configuration and data."""
    found = {}

    def get(name):
        if name not in found:
            overrides = [REGRESSION] if name == "diabetes" else []
            found[name] = prepared(tmp_path_factory.mktemp(name), shipped(OF[name]), *overrides)
        return found[name]

    return get


def changed(config, **settings):
    model = config.model.model_copy(update={"config": {**config.model.config, **settings}})
    return config.model_copy(update={"model": model})


def numbers(records, names):
    return np.array([[float(record[name]) for name in names] for record in records])


def exported(learner, folder):
    folder.mkdir(exist_ok=True)
    learner.export(folder)
    return load(folder)


@pytest.mark.parametrize("name", ["cancer", "wine", "diabetes"])
def test_boosting_resumes_to_the_same_trees(tables, tmp_path, name):
    config, data = tables(name)
    config = changed(
        config, rounds_per_step=3, bagging_fraction=0.7, bagging_freq=1, feature_fraction=0.6
    )
    whole = LightGBMLearner(config, data)
    for _ in range(4):
        whole.learn([], learning_rate_scale=1.0)
    first, second = LightGBMLearner(config, data), LightGBMLearner(config, data)
    for _ in range(2):
        first.learn([], learning_rate_scale=1.0)
    second.restore({key: value.copy() for key, value in first.state().items()})
    for _ in range(2):
        second.learn([], learning_rate_scale=1.0)
    assert second.parts == whole.parts
    assert second.parameters == whole.parameters > 0
    assert second.validate([]) == whole.validate([])
    models = [exported(learner, tmp_path / str(id(learner))) for learner in (whole, second)]
    records, _ = read_side(data, "train")
    left, right = (model.outputs(records) for model in models)
    assert (left == right).all()


def test_resume_bins_a_sample_of_the_values_as_before(tables):
    """As LightGBM does from 200,000 rows."""
    config, data = tables("cancer")

    def learner():
        made = LightGBMLearner(config, data)
        made.given["bin_construct_sample_cnt"] = 40
        return made

    whole, first, second = learner(), learner(), learner()
    for each in (whole, whole, first):
        each.learn([], learning_rate_scale=1.0)
    second.restore(first.state())
    second.learn([], learning_rate_scale=1.0)
    assert second.parts == whole.parts
    full = LightGBMLearner(config, data)
    full.learn([], learning_rate_scale=1.0)
    assert full.parts[0] != whole.parts[0], "the sample makes a difference"


@pytest.mark.parametrize("name", ["cancer", "wine", "diabetes"])
def test_exported_trees_predict_what_was_validated(tables, tmp_path, name):
    config, data = tables(name)
    learner = LightGBMLearner(config, data)
    for _ in range(3):
        learner.learn([], learning_rate_scale=1.0)
    model = exported(learner, tmp_path / "model")
    records, targets = read_side(data, "validation")
    found = model.outputs(records)
    if data.labels:
        loss = log_loss(targets, np.exp(found), labels=range(len(data.labels)))
    else:
        loss = float(np.mean((found - targets) ** 2))
    assert learner.validate([])["loss"] == pytest.approx(loss, rel=1e-9)


def test_test_loss_of_numbers_is_the_squared_error_as_in_validation(tables, tmp_path):
    config, data = tables("diabetes")
    learner = LightGBMLearner(config, data)
    learner.learn([], learning_rate_scale=1.0)
    model = exported(learner, tmp_path / "model")
    records = judged_records(config, data)
    scores = TableNumberScorer(config, data).score({"model": model}, records)
    assert scores["loss"] == scores["squared_error"]


def test_one_step_is_what_lightgbm_learns_from_the_same_start(tables):
    config, data = tables("cancer")
    config = changed(config, rounds_per_step=20, num_leaves=7)
    learner = LightGBMLearner(config, data)
    learner.learn([], learning_rate_scale=1.0)
    records, targets = read_side(data, "train")
    matrix = numbers(records, learner.preparation.columns)
    alone = lightgbm.LGBMClassifier(
        n_estimators=20, num_leaves=7, learning_rate=0.1, verbosity=-1, n_jobs=1
    )
    alone.fit(matrix, targets, init_score=np.full(len(targets), learner.base()[0]))
    theirs = alone.booster_.predict(matrix, raw_score=True) + learner.base()[0]
    np.testing.assert_allclose(learner.raw[:, 0], theirs, rtol=1e-9)


@pytest.mark.parametrize("name", ["cancer", "wine", "diabetes"])
def test_linear_model_is_that_of_scikit_learn(tables, tmp_path, name):
    config, data = tables(name)
    model = config.model.model_copy(
        update={"framework": "sklearn", "config": {"model_type": "linear", "penalty": 2.0}}
    )
    learner = LinearLearner(config.model_copy(update={"model": model}), data)
    learner.learn([], learning_rate_scale=1.0)
    ours = exported(learner, tmp_path / "model")
    records, targets = read_side(data, "train")
    held, _ = read_side(data, "validation")
    names = learner.preparation.columns
    last = LogisticRegression(C=0.5, max_iter=1000) if data.labels else Ridge(alpha=2.0)
    theirs = make_pipeline(StandardScaler(), last).fit(numbers(records, names), targets)
    rows = numbers(held, names)
    if data.labels:
        found, expected = np.exp(ours.outputs(held)), theirs.predict_proba(rows)
    else:
        found, expected = ours.outputs(held), theirs.predict(rows)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"leaves": 3}, "model.config.leaves = 3"),
        ({"model_type": "xgboost"}, "model.config.model_type = 'xgboost'"),
        ({"rounds_per_step": 2.5}, "model.config.rounds_per_step = 2.5"),
        ({"rounds_per_step": 0}, "model.config.rounds_per_step = 0"),
    ],
)
def test_setting_that_nothing_reads_is_refused(tables, settings, message):
    config, data = tables("cancer")
    with pytest.raises(BadInput, match=re.escape(message)):
        LightGBMLearner(changed(config, **settings), data)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.config={model_type: linear, penalty: 0}"], "model.config.penalty = 0"),
        (["model.config={model_type: linear, penalty: much}"], "model.config.penalty = 'much'"),
        (["training.learning_rate=0.1"], "training.learning_rate = 0.1"),
        (["data.labels=[class_0, class_1, class_2, class_3]"], "no training record has the class"),
    ],
)
def test_linear_model_refuses_what_it_cannot_fit(tmp_path, overrides, message):
    config, data = prepared(tmp_path, shipped("wine"), *LINEAR, *overrides)
    with pytest.raises(BadInput, match=re.escape(message)):
        LinearLearner(config, data).learn([], learning_rate_scale=1.0)


def test_linear_model_that_has_not_converged_is_an_error(tmp_path, monkeypatch):
    config, data = prepared(tmp_path, shipped("wine"), *LINEAR)
    monkeypatch.setattr(sklearn, "_ITERATIONS", 2)
    with pytest.raises(BadInput, match="has not converged after 2 iterations"):
        LinearLearner(config, data).learn([], learning_rate_scale=1.0)


def test_setting_that_lightgbm_refuses_is_named(tables):
    config, data = tables("cancer")
    learner = LightGBMLearner(changed(config, num_leaves=1), data)
    with pytest.raises(BadInput, match=r"model\.config.*num_leaves"):
        learner.learn([], learning_rate_scale=1.0)


def test_linear_overrides_are_a_run(tmp_path):
    config, data = prepared(tmp_path, shipped("wine"), *LINEAR)
    learner = LinearLearner(config, data)
    learner.learn([], learning_rate_scale=1.0)
    assert learner.validate([])["accuracy"] > 0.9


@pytest.mark.parametrize("name", ["cancer", "diabetes"])
def test_task_declares_the_metrics_that_a_learner_reports(tables, name):
    config, data = tables(name)
    declared = load_task(config.data.task).metrics(config)
    assert {*LightGBMLearner(config, data).validate([])} == {*declared}
    assert declared[0] == LightGBMLearner.metric


def test_learner_of_a_large_table_uses_its_share_of_the_cores(tables, monkeypatch):
    config, data = tables("wine")
    compute = config.compute.model_copy(update={"threads_per_rank": 3})
    shared = config.model_copy(update={"compute": compute})
    assert LightGBMLearner(shared, data).threads == 1
    monkeypatch.setattr(lightgbm_trees, "_LARGE", 10)
    assert LightGBMLearner(shared, data).threads == 3
    assert LightGBMLearner(config, data).threads == len(os.sched_getaffinity(0))
