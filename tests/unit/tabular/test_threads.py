"""Every family of models of tables learns with the threads that `compute.threads_per_rank` says."""

from __future__ import annotations

import catboost
import lightgbm
import pytest
import torch
import xgboost
from sklearn import ensemble
from sklearn.linear_model import LogisticRegression, Ridge
from threadpoolctl import threadpool_info, threadpool_limits

from steadytrain.components.shared import plugins
from steadytrain.components.tabular.learners.torch_tables import MlpLearner
from steadytrain.components.tabular.model import NeighborsModel
from steadytrain.components.train.agent import ranks
from steadytrain.components.train.framework import lightgbm as lightgbm_trees

from support.tables import REGRESSION, prepared, shipped

THREADS = 3


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    """Return the prepared tables of a task of classes, and of one of numbers."""
    return {
        "wine": prepared(tmp_path_factory.mktemp("wine"), shipped("wine")),
        "diabetes": prepared(tmp_path_factory.mktemp("diabetes"), shipped("diabetes"), REGRESSION),
    }


def made(table, framework, family, threads=THREADS):
    config, data = table
    model = config.model.model_copy(
        update={"framework": framework, "config": {"model_type": family}}
    )
    compute = config.compute.model_copy(update={"threads_per_rank": threads})
    changed = config.model_copy(update={"model": model, "compute": compute})
    return plugins.load(plugins.TRAINERS, framework).learner(changed, data)


def pools(kind):
    return {pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == kind}


def jobs(forest, *_):
    return {forest.n_jobs}


def linear_algebra(*_):
    return pools("blas")


# What learns, and the threads that it has when it is called.
CALLS = {
    "lightgbm": (lightgbm, "train", lambda settings, *_: {settings["num_threads"]}),
    "xgboost": (xgboost, "train", lambda settings, *_: {settings["nthread"]}),
    "catboost": (catboost.CatBoost, "fit", lambda one, *_: {one.get_param("thread_count")}),
    "random_forest": (ensemble.RandomForestClassifier, "fit", jobs),
    "extra_trees": (ensemble.ExtraTreesClassifier, "fit", jobs),
    "hist_boosting": (
        *(ensemble.HistGradientBoostingClassifier, "fit"),
        lambda *_: pools("openmp"),
    ),
    "linear": (LogisticRegression, "fit", linear_algebra),
    "ridge": (Ridge, "fit", linear_algebra),
    "knn": (NeighborsModel, "raw", linear_algebra),
}


@pytest.mark.parametrize("family", CALLS)
@pytest.mark.parametrize(("large", "expected"), [(True, THREADS), (False, 1)])
def test_a_family_learns_a_large_table_with_the_threads_of_its_rank(
    tables, monkeypatch, family, large, expected
):
    """A small one has a single thread."""
    if large:
        monkeypatch.setattr(lightgbm_trees, "_LARGE", 10)
    owner, name, threads_of = CALLS[family]
    original, seen = getattr(owner, name), []

    def noted(*given, **named):
        seen.append(threads_of(*given))
        return original(*given, **named)

    monkeypatch.setattr(owner, name, noted)
    framework = family if family in ("lightgbm", "xgboost", "catboost") else "sklearn"
    table = tables["diabetes" if family == "ridge" else "wine"]
    # As in a rank that is forked, where libraries have been loaded with another number.
    with threadpool_limits(2):
        learner = made(table, framework, "linear" if family == "ridge" else family)
        learner.learn([], learning_rate_scale=1.0)
        learner.validate([])
    assert seen
    assert all(each == {expected} for each in seen)


@pytest.mark.parametrize("family", ["mlp", "tabm"])
def test_a_network_of_a_table_has_the_threads_of_its_rank(tables, monkeypatch, family, tmp_path):
    """Torch does not shrink them for a small table; the rank sets them before all else."""
    before, seen, original = torch.get_num_threads(), [], MlpLearner._step

    def noted(self, *given):
        seen.append(torch.get_num_threads())
        return original(self, *given)

    monkeypatch.setattr(MlpLearner, "_step", noted)
    alone = ranks.NodeShare(0, 1, 1)
    environment = ranks._environment(tmp_path, alone, THREADS)
    monkeypatch.setenv("OMP_NUM_THREADS", environment["OMP_NUM_THREADS"])
    try:
        ranks._use_threads()
        learner = made(tables["wine"], "pytorch_tables", family)
        learner.learn([], learning_rate_scale=1.0)
    finally:
        torch.set_num_threads(before)
    assert {*seen} == {THREADS}
