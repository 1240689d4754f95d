"""An ensemble trains its members on everything but the test side, and predicts their mean."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest
from sklearn.isotonic import IsotonicRegression

from steadytrain.components.evaluate.scoring import judged_records
from steadytrain.components.shared.config import from_mapping
from steadytrain.components.shared.config.space import changed
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.tabular.encoder import parsed
from steadytrain.components.tabular.learners import read_side
from steadytrain.components.tabular.learners.ensemble import TableEnsembleLearner
from steadytrain.components.tabular.model import load
from steadytrain.components.tabular.scoring import TableClassScorer
from steadytrain.components.train.step import load_trainer

from support.tables import REGRESSION, prepared, shipped

MEMBERS = """[
{weight: 3, framework: lightgbm, config: {model_type: lightgbm, num_leaves: 7}, max_steps: 3,
 learning_rate: 0.2},
{framework: sklearn, config: {model_type: linear, penalty: 1.0}},
{framework: sklearn, config: {model_type: extra_trees}, max_steps: 2}]"""
ENSEMBLE = (
    "model.framework=ensemble",
    f"model.config={{model_type: ensemble, members: {MEMBERS}}}",
    "training.max_steps=3",
    "training.load_best_model_at_end=false",
    "training.early_stopping_patience=null",
)
CALIBRATED = {
    "model_type": "ensemble",
    "members": [{"framework": "sklearn", "config": {"model_type": "dummy"}}] * 3,
}


@pytest.fixture(scope="module", params=["wine", "breast_cancer", "diabetes"])
def tables(request, tmp_path_factory):
    more = [REGRESSION] if request.param == "diabetes" else []
    folder = tmp_path_factory.mktemp("ensemble")
    return prepared(folder, shipped(request.param), *ENSEMBLE, *more)


def trained(config, data, steps=3):
    learner = TableEnsembleLearner(config, data)
    for _ in range(steps):
        learner.learn((), learning_rate_scale=1.0)
    return learner


def outputs(learner, folder, records):
    folder.mkdir()
    learner.export(folder)
    return load(folder).outputs(records)


def test_prediction_is_the_weighted_mean_of_the_members(tables, tmp_path):
    config, data = tables
    records, _ = read_side(data, "validation")
    found = outputs(trained(config, data), tmp_path / "model", records)
    members = []
    learner = TableEnsembleLearner(config, data)
    for item, own in zip(learner.members, learner.configs, strict=True):
        alone = load_trainer(item.framework).learner(own, learner.data)
        for _ in range(item.max_steps):
            alone.learn((), learning_rate_scale=1.0)
        members.append(alone.model().outputs(records))
    if data.labels:
        members, found = np.exp(members), np.exp(found)
    assert found == pytest.approx(np.average(members, axis=0, weights=[3, 1, 1]), rel=1e-9)


def test_calibration_leaves_with_the_exported_model(tables, tmp_path):
    config, data = tables
    records, _ = read_side(data, "validation")
    plain = outputs(trained(config, data), tmp_path / "plain", records)
    given = {"temperature": 2.0, "decision": dict.fromkeys(data.labels, 1.0)}
    if not data.labels:
        with pytest.raises(BadInput, match="temperature = 2"):
            TableEnsembleLearner(with_settings(config, **given), data)
        return
    given["decision"][data.labels[0]] = 100.0
    folder = tmp_path / "calibrated"
    found = outputs(trained(with_settings(config, **given), data), folder, records)
    softer = np.exp(plain) ** 0.5
    assert np.exp(found) == pytest.approx(softer / softer.sum(axis=1, keepdims=True), rel=1e-9)
    # The exported file, which needs no steadytrain, decides likewise.
    spec = importlib.util.spec_from_file_location("exported", folder / "model.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    weights = np.array([100.0, *[1.0] * (len(data.labels) - 1)])
    expected = [data.labels[n] for n in (np.exp(found) * weights).argmax(axis=1)]
    told = [row["prediction"] for row in module.load(folder).rows(records)]
    assert told == expected
    assert told != [data.labels[n] for n in found.argmax(axis=1)]
    # What the gate sees are these decisions.
    scorer = TableClassScorer(config, data)
    judged = judged_records(config, data)
    table = scorer.score({"model": load(folder)}, judged)
    again = [row["prediction"] for row in load(folder).rows(parsed(judged))]
    assert [data.labels[n] for n in table["prediction"].to_pylist()] == again


def test_isotonic_regression_leaves_with_the_exported_model(tables, tmp_path):
    config, data = tables
    records, truth = read_side(data, "train")
    if not data.labels:
        with pytest.raises(BadInput, match="isotonic"):
            TableEnsembleLearner(with_settings(config, isotonic=[[[0.0, 1.0], [0.0, 1.0]]]), data)
        return
    plain = np.exp(outputs(trained(config, data), tmp_path / "plain", records))
    several = len(data.labels) > 2
    regressions = [
        IsotonicRegression(out_of_bounds="clip").fit(plain[:, place], truth == place)
        for place in (range(len(data.labels)) if several else (1,))
    ]
    given = [[one.X_thresholds_.tolist(), one.y_thresholds_.tolist()] for one in regressions]
    folder = tmp_path / "calibrated"
    learner = trained(with_settings(config, isotonic=given), data)
    held, _ = read_side(data, "validation")
    found = np.exp(outputs(learner, folder, held))
    before = np.exp(load(tmp_path / "plain").outputs(held))
    expected = np.stack(
        [one.predict(before[:, place]) for place, one in enumerate(regressions, not several)], 1
    )
    if several:
        expected /= expected.sum(axis=1, keepdims=True)
    else:
        expected = np.concatenate([1 - expected, expected], axis=1)
    assert found == pytest.approx(expected, abs=1e-9)
    # The exported file, which needs no steadytrain, does likewise.
    spec = importlib.util.spec_from_file_location("exported_isotonic", folder / "model.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    told = [list(row.values())[1:] for row in module.load(folder).rows(held)]
    assert np.array(told) == pytest.approx(found)
    falling = [[at, values[::-1]] for at, values in given]
    for wrong in (falling, given[:-1], [[[0.0, 2.0], [0.0, 1.0]]] * len(given), "isotonic"):
        if wrong:
            with pytest.raises(BadInput, match=r"model\.config\.isotonic"):
                TableEnsembleLearner(with_settings(config, isotonic=wrong), data)
    with pytest.raises(BadInput, match=r"model\.config\.isotonic"):
        TableEnsembleLearner(with_settings(config, isotonic=given, temperature=2.0), data)


def with_settings(config, **settings):
    return from_mapping(changed(config, {"model.config": {**config.model.config, **settings}}))


def test_members_learn_from_the_validation_side_too(tables):
    config, data = tables
    train, validation = data.sides["train"].rows, data.sides["validation"].rows
    records, _ = read_side(TableEnsembleLearner(config, data).data, "train")
    assert len(records) == train + validation


def test_interrupted_training_continues_to_identical_predictions(tables, tmp_path):
    config, data = tables
    records, _ = read_side(data, "validation")
    whole = outputs(trained(config, data), tmp_path / "whole", records)
    for steps in (0, 1, 2):
        resumed = TableEnsembleLearner(config, data)
        resumed.restore(trained(config, data, steps).state())
        for _ in range(3 - steps):
            resumed.learn((), learning_rate_scale=1.0)
        again = outputs(resumed, tmp_path / str(steps), records)
        assert np.array_equal(again, whole)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"training.max_steps": 2}, "training.max_steps = 2"),
        ({"model.config": {"model_type": "ensemble", "members": []}}, "has no member"),
        (
            {"model.config": {**CALIBRATED, "temperature": 0}},
            r"model.config.temperature = 0",
        ),
        (
            {"model.config": {**CALIBRATED, "decision": {"no such class": 1.0}}},
            r"model.config.decision = .'no such class'",
        ),
        (
            {"model.config": {"model_type": "ensemble", "members": [{"weight": 0}]}},
            "model.config.members: 0.weight",
        ),
    ],
)
def test_what_is_no_ensemble_is_bad_input(tables, change, named):
    config, data = tables
    with pytest.raises(BadInput, match=named):
        TableEnsembleLearner(from_mapping(changed(config, change)), data)
