"""Records that weigh more, classes that weigh more, and outputs that rise with a column."""

from __future__ import annotations

import json
import re

import numpy as np
import pandas as pd
import pytest
from sklearn.linear_model import Ridge

from steadytrain.components.shared import plugins
from steadytrain.components.shared.config import load
from steadytrain.components.shared.errors import BadInput, ConfigError
from steadytrain.components.tabular.learners import read_side, read_table, sklearn, torch_tables
from steadytrain.components.tabular.learners.boosting import (
    CatBoostLearner,
    LightGBMLearner,
    XGBoostLearner,
)
from steadytrain.components.tabular.learners.keras import JaxLearner

from support.label_sets import SETS
from support.tables import REGRESSION, prepared, shipped

NETWORKS = {
    "mlp": "pytorch_tables",
    "tabm": "pytorch_tables",
    "jax": "jax",
}
FRAMEWORK = {name: name for name in ("lightgbm", "xgboost", "catboost")} | NETWORKS
BOOSTED = ("lightgbm", "xgboost", "catboost", "hist_boosting")
FORESTS = ("random_forest", "extra_trees")
WEIGHING = (*BOOSTED, "dummy", "linear", *FORESTS, *NETWORKS)


def learned(table, family, steps=5, **settings):
    config, data = table
    framework = FRAMEWORK.get(family, "sklearn")
    model_type = "mlp" if family == "jax" else family
    model = {"framework": framework, "config": {"model_type": model_type, **settings}}
    config = config.model_copy(update={"model": config.model.model_copy(update=model)})
    learner = plugins.load(plugins.TRAINERS, framework).learner(config, data)
    for _ in range(steps):
        learner.learn([], learning_rate_scale=1.0)
    return learner


def noisy(rows, seed=0):
    """Return records whose class is a coin's, whatever they say."""
    chance = np.random.default_rng(seed)
    return pd.DataFrame(
        {
            "x": chance.normal(size=rows).round(3),
            "y": chance.normal(size=rows).round(3),
            "target": np.where(chance.random(rows) < 0.2, "rare", "usual"),
        }
    )


def mean_share(learner):
    """Return the mean probability of the class `rare`."""
    outputs = learner.model().outputs([{"x": 0, "y": 0}, {"x": 1, "y": -1}, {"x": -1, "y": 1}])
    return float(np.exp(outputs[:, 0]).mean())


@pytest.fixture(scope="module")
def coins(tmp_path_factory):
    """Return prepared data where the weight of a record depends on its class, and without it."""
    frame = noisy(3000)
    frame["weigh"] = np.where(frame["target"] == "rare", 4.0, 1.0)
    weighed = prepared(tmp_path_factory.mktemp("w"), frame, "data.columns.weight=weigh")
    plain = prepared(tmp_path_factory.mktemp("p"), frame.drop(columns="weigh"))
    balanced = prepared(
        tmp_path_factory.mktemp("b"),
        frame.drop(columns="weigh"),
        "training.class_weights.kind=balanced",
    )
    return {"weighed": weighed, "plain": plain, "balanced": balanced}


def short(family):
    """Return steps and settings in which a family learns a constant, and little else."""
    if family in NETWORKS:
        return 15, {"width": 8, "layers": 1}
    return 2, {"max_depth": 3} if family in FORESTS else {}


def test_every_family_that_weighs_is_here():
    boosted = [CatBoostLearner, LightGBMLearner, XGBoostLearner, JaxLearner]
    every = {**sklearn.MODELS, **torch_tables.MODELS, **{it.__name__: it for it in boosted}}
    weighing = [it for it in every.values() if it.weighs]
    assert len(weighing) == len(WEIGHING) == len(every) - 1


@pytest.mark.parametrize("family", WEIGHING)
def test_weights_move_probabilities_to_the_class_that_weighs_more(coins, family):
    steps, settings = short(family)
    shares = {
        name: mean_share(learned(table, family, steps, **settings)) for name, table in coins.items()
    }
    assert shares["plain"] == pytest.approx(0.2, abs=0.06)
    for name in ("weighed", "balanced"):
        assert shares[name] == pytest.approx(0.5, abs=0.08)


@pytest.fixture(scope="module")
def coins_as_numbers(coins, tmp_path_factory):
    """Return the same with 1 for the class that weighs more, and 0 for the other."""
    frame = noisy(3000)
    frame["target"] = np.where(frame["target"] == "rare", 1.0, 0.0)
    frame["weigh"] = np.where(frame["target"] == 1, 4.0, 1.0)
    weight = "data.columns.weight=weigh"
    weighed = prepared(tmp_path_factory.mktemp("n"), frame, REGRESSION, weight)
    plain = prepared(tmp_path_factory.mktemp("o"), frame.drop(columns="weigh"), REGRESSION)
    return {"weighed": weighed, "plain": plain}


@pytest.mark.parametrize("family", WEIGHING)
def test_weights_move_predicted_numbers(coins_as_numbers, family):
    steps, settings = short(family)
    records = [{"x": 0, "y": 0}, {"x": 1, "y": -1}, {"x": -1, "y": 1}]
    means = {
        name: learned(table, family, steps, **settings).model().outputs(records).mean()
        for name, table in coins_as_numbers.items()
    }
    assert means["plain"] == pytest.approx(0.2, abs=0.06)
    assert means["weighed"] == pytest.approx(0.5, abs=0.08)


@pytest.mark.parametrize("family", WEIGHING)
def test_weights_move_the_probability_of_each_label(tmp_path, family):
    frame = noisy(1500)
    frame["weigh"] = np.where(frame["target"] == "rare", 4.0, 1.0)
    frame["target"] = np.where(frame["target"] == "rare", "rare;odd", "usual")
    table = prepared(tmp_path, frame, *SETS, "data.columns.weight=weigh")
    steps, settings = short(family)
    learner = learned(table, family, steps, **settings)
    others = noisy(300, seed=1)[["x", "y"]].to_dict("records")
    chances = np.exp(learner.model().outputs(others))
    assert learner.labels == ["odd", "rare", "usual"]
    assert chances.mean(axis=0) == pytest.approx([0.5, 0.5, 0.5], abs=0.1)


def test_linear_model_with_weights_is_scikit_learns(tmp_path):
    frame = shipped("diabetes")
    frame["times"] = 1 + np.arange(len(frame)) % 3
    learner = learned(
        prepared(tmp_path, frame, REGRESSION, "data.columns.weight=times"), "linear", 1
    )
    repeats = np.round(learner.row_weights / learner.row_weights.min()).astype(int)
    # A penalty of 1 beside weights with a mean of 1.
    theirs = Ridge(alpha=repeats.mean()).fit(
        np.repeat(learner.inputs, repeats, axis=0), np.repeat(learner.targets, repeats)
    )
    assert learner.weights[:, 0] == pytest.approx(theirs.coef_)
    assert learner.intercept == pytest.approx([theirs.intercept_])


def test_weight_is_no_feature(coins):
    assert read_table(coins["weighed"][1]).features == {"x": "number", "y": "number"}
    records, _ = read_side(coins["weighed"][1], "train")
    assert {record["weigh"] for record in records} == {1.0, 4.0}


@pytest.mark.parametrize("family", BOOSTED)
def test_whole_weights_are_like_repeated_records(tmp_path, family):
    frame = shipped("diabetes")
    frame["times"] = 1 + np.arange(len(frame)) % 3
    weighed = prepared(tmp_path, frame, REGRESSION, "data.columns.weight=times")
    learner = learned(weighed, family, 0)
    repeats = np.round(learner.row_weights / learner.row_weights.min()).astype(int)
    assert {*repeats} == {1, 2, 3}
    mean = np.repeat(learner.targets, repeats).mean()
    assert learner.base() == pytest.approx([mean])
    learner.learn([], learning_rate_scale=1.0)
    losses = learner.losses(learner.raw_outputs(learner.raw), learner.targets)
    assert np.repeat(losses, repeats).mean() < np.var(np.repeat(learner.targets, repeats))


@pytest.mark.parametrize("family", BOOSTED)
@pytest.mark.parametrize("kind", ["classes", "numbers"])
def test_outputs_are_monotone_in_the_columns_that_are_named(tmp_path, family, kind):
    chance = np.random.default_rng(3)
    frame = pd.DataFrame(chance.normal(size=(1500, 3)).round(3), columns=["up", "down", "free"])
    signal = frame["up"] - frame["down"] + np.sin(3 * frame["free"]) + chance.normal(size=1500)
    frame["target"] = np.where(signal > 0, "yes", "no") if kind == "classes" else signal
    table = prepared(tmp_path, frame, *([REGRESSION] if kind == "numbers" else []))
    grid = np.linspace(-3, 3, 61)
    fixed = chance.normal(size=(30, 3))

    def rises(learner, name):
        """Return the least and the greatest change of an output along the column."""
        model, changes = learner.model(), []
        for row in fixed:
            place = dict(zip(["up", "down", "free"], row.tolist(), strict=True))
            records = [{**place, name: value} for value in grid.tolist()]
            changes.append(np.diff(model.raw(model.preparation.matrix(records))[:, 0]))
        return np.min(changes), np.max(changes)

    free = learned(table, family)
    bound = learned(table, family, monotone={"up": 1, "down": -1})
    assert rises(free, "up")[0] < -1e-4, "without the constraint, it is not monotone"
    assert rises(bound, "up")[0] >= -1e-6 < rises(bound, "up")[1]
    assert rises(bound, "down")[1] <= 1e-6
    assert rises(bound, "free")[0] < -1e-4 < 1e-4 < rises(bound, "free")[1]


@pytest.mark.parametrize(
    ("family", "monotone", "message"),
    [
        ("lightgbm", {"x": 1, "z": 1}, "'z': 1}: 'z' is no column of numbers to learn from"),
        ("xgboost", {"x": 2}, "model.config.monotone = {'x': 2}: it does not map columns"),
        ("catboost", {"x": True}, "model.config.monotone = {'x': True}"),
        ("hist_boosting", [1, 0], "model.config.monotone = [1, 0]"),
        ("random_forest", {"x": 1}, "random_forest has no such setting"),
        ("linear", {"x": 1}, "linear has no such setting"),
        ("extra_trees", {"x": 1}, "extra_trees has no such setting"),
        ("mlp", {"x": 1}, "mlp has no such setting"),
        ("tabm", {"x": 1}, "tabm has no such setting"),
    ],
)
def test_monotone_of_something_else_is_refused(coins, family, monotone, message):
    with pytest.raises(BadInput, match=re.escape(message)):
        learned(coins["plain"], family, 0, monotone=monotone)


@pytest.mark.parametrize("linear", [True, "true", "+"])
def test_monotone_linear_leaves_are_refused(coins, linear):
    """LightGBM chooses their splits by the constraints, and fits them without."""
    message = f"model.config.linear_tree = {linear!r}: in linear leaves, LightGBM does not keep"
    with pytest.raises(BadInput, match=re.escape(message)) as refused:
        learned(coins["plain"], "lightgbm", 0, linear_tree=linear, monotone={"x": 1})
    assert refused.value.remedy == "leave one of the two out"


@pytest.mark.parametrize(
    "given",
    [
        {"linear_tree": False, "monotone": {"x": 1}},
        {"linear_tree": True, "monotone": {}},
        {"linear_tree": True},
    ],
)
def test_linear_leaves_or_monotone_outputs_are_learned(coins, given):
    learned(coins["plain"], "lightgbm", 1, **given)


def test_monotone_classes_are_refused(tmp_path):
    table = prepared(tmp_path, shipped("wine"))
    with pytest.raises(BadInput, match="with 3 classes, none of them rises alone"):
        learned(table, "lightgbm", 0, monotone={"alcohol": 1})


@pytest.mark.parametrize(
    ("name", "field"), [("weighed", "data.columns.weight"), ("balanced", "training.class_weights")]
)
def test_weights_that_neighbors_do_not_read_are_refused(coins, name, field):
    with pytest.raises(BadInput, match=field):
        learned(coins[name], "knn", 0)


def test_weight_that_is_not_a_number_is_a_defect(tmp_path):
    frame = noisy(300)
    frame["weigh"] = [0 if row == 7 else 1.5 for row in range(300)]
    _, data = prepared(tmp_path, frame, "data.columns.weight=weigh")
    defects = data.path("quarantine.jsonl").read_text().splitlines()
    assert len(defects) == 1
    assert "weigh is '0.0', not a number above 0" in json.dumps(json.loads(defects[0]))


def test_texts_have_no_weight():
    with pytest.raises(ConfigError, match=r"data\.columns\.weight.*causal_lm does not read it"):
        load("causal-lm", ["data.columns.weight=w"])
