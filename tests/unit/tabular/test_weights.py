"""Records that weigh more, classes that weigh more, and outputs that rise with a column."""

from __future__ import annotations

import json
import re

import numpy as np
import pandas as pd
import pytest

from steadytrain.components.shared import plugins
from steadytrain.components.shared.config import load
from steadytrain.components.shared.errors import BadInput, ConfigError
from steadytrain.components.tabular.learners import read_side, read_table

from support.tables import REGRESSION, prepared, shipped

FRAMEWORK = {"lightgbm": "lightgbm", "xgboost": "xgboost", "catboost": "catboost"}
BOOSTED = ("lightgbm", "xgboost", "catboost", "hist_boosting")
WEIGHING = (*BOOSTED, "dummy", "linear", "random_forest")


def learned(table, family, steps=5, **settings):
    config, data = table
    framework = FRAMEWORK.get(family, "sklearn")
    model = {"framework": framework, "config": {"model_type": family, **settings}}
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


@pytest.mark.parametrize("family", WEIGHING)
def test_weights_move_probabilities_to_the_class_that_weighs_more(coins, family):
    settings = {"max_depth": 3} if family == "random_forest" else {}
    shares = {
        name: mean_share(learned(table, family, 2, **settings)) for name, table in coins.items()
    }
    assert shares["plain"] == pytest.approx(0.2, abs=0.06)
    for name in ("weighed", "balanced"):
        assert shares[name] == pytest.approx(0.5, abs=0.08)


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
        ("lightgbm", {"z": 1}, "model.config.monotone = {'z': 1}"),
        ("xgboost", {"x": 2}, "model.config.monotone = {'x': 2}"),
        ("catboost", {"x": True}, "model.config.monotone = {'x': True}"),
        ("hist_boosting", [1, 0], "model.config.monotone = [1, 0]"),
        ("random_forest", {"x": 1}, "random_forest has no such setting"),
        ("linear", {"x": 1}, "linear has no such setting"),
    ],
)
def test_monotone_of_something_else_is_refused(coins, family, monotone, message):
    with pytest.raises(BadInput, match=re.escape(message)):
        learned(coins["plain"], family, 0, monotone=monotone)


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
