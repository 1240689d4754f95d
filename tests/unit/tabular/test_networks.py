"""Networks of tables agree with PyTorch's own layers and optimizer."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.preprocessing import QuantileTransformer

from steadytrain.components.tabular.learners import read_side
from steadytrain.components.tabular.learners.torch_tables import MlpLearner, TabMLearner
from steadytrain.components.tabular.model import load, log_probabilities

from support.tables import REGRESSION, prepared, shipped


def made(cls, table, **settings):
    config, data = table
    model = {"framework": "pytorch_tables", "config": {"model_type": cls.model_type, **settings}}
    model = config.model.model_copy(update=model)
    return cls(config.model_copy(update={"model": model}), data)


@pytest.fixture(scope="module")
def wine(tmp_path_factory):
    return prepared(tmp_path_factory.mktemp("wine"), shipped("wine"))


def test_perceptron_learns_what_pytorch_learns_with_its_own_layers(wine):
    how = {"width": 24, "layers": 2, "dropout": 0, "batch_size": 32, "weight_decay": 0.01}
    learner = made(MlpLearner, wine, **how)
    layers = []
    for name, bias in (("weight0", "bias0"), ("weight1", "bias1"), ("head", "head_bias")):
        weight = learner.weights[name].reshape(-1, learner.weights[name].shape[-1])
        layer = torch.nn.Linear(*weight.shape)
        layer.weight.data, layer.bias.data = weight.T.clone(), learner.weights[bias][0].clone()
        layers += [layer, torch.nn.ReLU()]
    network = torch.nn.Sequential(*layers[:-1])
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3, weight_decay=0.01)
    targets = torch.from_numpy(learner.targets).long()
    for epoch in range(2):
        learner.learn([], learning_rate_scale=1.0)
        chance = torch.Generator().manual_seed(learner.seed + epoch)
        for some in torch.randperm(len(targets), generator=chance).split(32):
            loss = torch.nn.functional.cross_entropy(network(learner.numbers[some]), targets[some])
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
            optimizer.step()
    theirs = network(learner.numbers).log_softmax(dim=1).detach().numpy()
    ours = log_probabilities(learner.model().raw(learner.matrix))
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4)


def test_members_of_tabm_are_perceptrons_with_scaled_weights(wine):
    learner = made(TabMLearner, wine, width=8, layers=2, batch_size=32)
    learner.learn([], learning_rate_scale=1.0)
    weights = {name: weight.numpy() for name, weight in learner.weights.items()}
    numbers = learner.numbers.numpy()
    chances = []
    for member in range(32):
        hidden = numbers
        for layer in range(2):
            scaled = weights[f"before{layer}"][member][:, None] * weights[f"weight{layer}"]
            scaled = scaled * weights[f"after{layer}"][member]
            hidden = np.maximum(hidden @ scaled + weights[f"bias{layer}"][member], 0)
        found = hidden @ weights["head"][member] + weights["head_bias"][member]
        chances.append(np.exp(log_probabilities(found)))
    assert np.std(chances, axis=0).mean() > 1e-3, "members differ"
    ours = np.exp(log_probabilities(learner.model().raw(learner.matrix)))
    np.testing.assert_allclose(ours, np.mean(chances, axis=0), rtol=1e-4, atol=1e-6)


def test_numbers_become_normal_as_in_scikit_learn(tmp_path):
    chance = np.random.default_rng(0)
    frame = shipped("diabetes")[["target"]]
    frame["skewed"] = np.exp(chance.normal(size=len(frame)) * 2)
    learner = made(MlpLearner, prepared(tmp_path, frame, REGRESSION))
    values = learner.matrix
    theirs = QuantileTransformer(n_quantiles=len(values), output_distribution="normal")
    expected = theirs.fit_transform(values)[:, 0]
    inner = np.abs(expected) < 2
    np.testing.assert_allclose(learner.numbers[:, 0].numpy()[inner], expected[inner], atol=0.02)
    assert float(learner.numbers[:, 0].abs().max()) < 3.2
    far = learner.inputs.read(np.array([[1e300], [-1e300], [np.nan]]))[0]
    assert np.isfinite(far).all()
    # No training record lacks it, so that no weight says what that means: it is the median.
    np.testing.assert_array_equal(far[:, 1], [0, 0, 0])
    assert far[2, 0] == 0


@pytest.mark.parametrize("cls", [MlpLearner, TabMLearner])
def test_missing_value_is_a_usual_one_where_training_had_none(tmp_path, cls):
    chance = np.random.default_rng(0)
    frame = pd.DataFrame({"x": chance.uniform(100, 200, 400), "hue": chance.choice([*"aab"], 400)})
    frame["gap"] = [None if n % 3 else x for n, x in enumerate(frame["x"])]
    frame["kind"] = [None if n % 3 else hue for n, hue in enumerate(frame["hue"])]
    frame["target"] = frame["x"] + 50 * (frame["hue"] == "b")
    learner = made(cls, prepared(tmp_path, frame, REGRESSION, "data.allow_leaks=[x]"), width=32)
    for _ in range(3):
        learner.learn([], learning_rate_scale=1.0)
    (tmp_path / "model").mkdir()
    learner.export(tmp_path / "model")
    model = load(tmp_path / "model")
    usual = {"x": learner.matrix[:, model.preparation.places["x"]], "gap": None, "kind": None}
    usual |= {"x": float(np.median(usual["x"])), "hue": "a"}
    records = [{**usual, "x": None}, {**usual, "hue": None}, {**usual, "hue": "unseen"}, usual]
    found = model.outputs(records)
    assert found[1] == found[2] == found[3]
    # The median is between two records.
    np.testing.assert_allclose(found[0], found[3], rtol=0.01)
    other = model.outputs([{**usual, "gap": 150.0}, {**usual, "kind": "a"}])
    assert not np.isclose(other, found[3], rtol=1e-6).any()


@pytest.mark.slow
@pytest.mark.parametrize("cls", [MlpLearner, TabMLearner])
def test_networks_learn_real_tables(tmp_path, cls):
    table = prepared(tmp_path, shipped("breast_cancer"))
    learner = made(cls, table, width=64)
    for _ in range(15):
        learner.learn([], learning_rate_scale=1.0)
    records, targets = read_side(table[1], "validation")
    found = learner.model().outputs(records)
    assert (found.argmax(axis=1) == targets).mean() > 0.92
