"""Networks of Keras: resumed, exported, and compared with PyTorch's gradients.

`make test-all` runs them with JAX and, in an environment that has it, with TensorFlow.
"""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from steadytrain.components.shared import plugins
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.tabular.learners import read_side
from steadytrain.components.tabular.model import load, log_probabilities

from support.label_sets import SETS, labeled_table
from support.selected import each
from support.tables import REGRESSION, prepared, shipped

BACKEND = "tensorflow" if importlib.util.find_spec("tensorflow") else "jax"
SMALL = {"width": 16, "layers": 2, "batch_size": 32}
ELSEWHERE = """
import json, sys

class NumpyAlone:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("steadytrain", "keras", "jax", "tensorflow", "torch"):
            raise ImportError(name)

sys.meta_path.insert(0, NumpyAlone())
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from model import load

print(json.dumps(load(Path(sys.argv[1])).outputs(json.loads(sys.stdin.read())).tolist()))
"""


def with_gaps(name):
    """Return a real table, also with missing values and categories."""
    frame = shipped(name)
    chance = np.random.default_rng(0)
    for size in (3, 40):
        frame[f"letters{size}"] = [f"l{place}" for place in chance.integers(0, size, len(frame))]
    for column in frame.columns:
        if column != "target":
            frame.loc[chance.random(len(frame)) < 0.1, column] = None
    return frame


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    return {
        "wine": prepared(tmp_path_factory.mktemp("wine"), with_gaps("wine")),
        "diabetes": prepared(
            tmp_path_factory.mktemp("diabetes"), with_gaps("diabetes"), REGRESSION
        ),
    }


def made(table, **settings):
    config, data = table
    model = {"framework": BACKEND, "config": {"model_type": "mlp", **SMALL, **settings}}
    model = config.model.model_copy(update=model)
    trainer = plugins.load(plugins.TRAINERS, BACKEND)
    return trainer.learner(config.model_copy(update={"model": model}), data)


def learn(learner, epochs):
    for _ in range(epochs):
        learner.learn([], learning_rate_scale=1.0)
    return learner


@pytest.mark.slow
@each("name", ["wine", "diabetes"], few=["wine"])
def test_network_resumes_to_identical_predictions_and_exports_what_was_validated(
    tables, tmp_path, name
):
    table = tables[name]
    whole = learn(made(table), 1)
    state = {key: value.copy() for key, value in whole.state().items()}
    learn(whole, 2)
    resumed = made(table)
    resumed.restore(state)
    learn(resumed, 2)
    assert resumed.state().keys() == state.keys()
    assert resumed.validate([]) == whole.validate([])
    assert all((whole.state()[key] == value).all() for key, value in resumed.state().items())
    folder = tmp_path / "model"
    folder.mkdir()
    whole.export(folder)
    assert {path.name for path in folder.iterdir()} == {"model.py", "table.json", "weights.npz"}
    again = tmp_path / "again"
    again.mkdir()
    resumed.export(again)
    for path in folder.iterdir():
        assert path.read_bytes() == (again / path.name).read_bytes()
    records, targets = read_side(table[1], "validation")
    found = load(folder).outputs(records)
    elsewhere = subprocess.run(
        [sys.executable, "-c", ELSEWHERE, folder],
        input=json.dumps(records),
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(elsewhere.stdout) == found.tolist()
    if name == "wine":
        loss = -found[np.arange(len(targets)), targets.astype(int)].mean()
    else:
        loss = np.mean((found - targets) ** 2)
    assert whole.validate([])["loss"] == pytest.approx(loss, rel=1e-9)
    raw = whole.network.predict(whole.inputs_of(whole.matrix), verbose=0)
    if name == "wine":
        theirs = log_probabilities(raw.astype(float))
    else:
        theirs = raw * whole.middle[1] + whole.middle[0]
    ours = whole.model().raw(whole.matrix)
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@each("name", ["wine", "diabetes"], few=["diabetes"])
def test_network_learns_from_weighed_records_what_gradients_of_pytorch_say(tables, name):
    learner = made(tables[name], dropout=0, weight_decay=0.01)
    chance = np.random.default_rng(0)
    learner.row_weights = chance.uniform(0.2, 1.8, len(learner.targets))
    weights = {key: torch.tensor(value) for key, value in learner.trained().items()}
    for weight in weights.values():
        weight.requires_grad_(True)
    moments = {key: [torch.zeros_like(weight)] * 2 for key, weight in weights.items()}
    numbers, places = (torch.from_numpy(each) for each in learner.inputs_of(learner.matrix))
    aims = torch.from_numpy(learner.aims)
    weighs = torch.from_numpy(learner.row_weights).float()

    def outputs(some):
        hidden = [numbers[some]]
        hidden += [weights[f"embedding{turn}"][places[some, turn].long()] for turn in range(2)]
        hidden = torch.cat(hidden, dim=1)
        for layer in range(2):
            hidden = (hidden @ weights[f"weight{layer}"] + weights[f"bias{layer}"]).relu()
        return hidden @ weights["head"][0] + weights["head_bias"]

    taken = 0
    for epoch in range(2):
        order = np.random.default_rng([learner.seed, epoch]).permutation(len(aims))
        total = 0.0
        for some in torch.from_numpy(order).split(32):
            if name == "wine":
                losses = torch.nn.functional.cross_entropy(
                    outputs(some), aims[some].long(), reduction="none"
                )
            else:
                losses = (outputs(some)[:, 0] - aims[some].float()).square()
            loss = (losses * weighs[some]).mean()
            total += float(loss.detach()) * len(some)
            for weight in weights.values():
                weight.grad = None
            loss.backward()
            torch.nn.utils.clip_grad_norm_(weights.values(), 1.0)
            taken += 1
            for key, weight in weights.items():
                # Keras adds epsilon before the correction of the second moment, PyTorch after it.
                first, second = moments[key]
                first = 0.9 * first + 0.1 * weight.grad
                second = 0.999 * second + 0.001 * weight.grad**2
                moments[key] = [first, second]
                rate = 1e-3 * (1 - 0.999**taken) ** 0.5 / (1 - 0.9**taken)
                weight.data *= 1 - 1e-3 * 0.01
                weight.data -= rate * first / (second.sqrt() + 1e-7)
        reported = learner.learn([], learning_rate_scale=1.0).loss
        assert reported == pytest.approx(total / len(aims) * learner.scale, rel=1e-4)
    for key, value in learner.trained().items():
        np.testing.assert_allclose(value, weights[key].detach(), rtol=2e-3, atol=2e-4)


@pytest.mark.slow
def test_network_learns_a_real_table(tmp_path):
    table = prepared(tmp_path, shipped("breast_cancer"))
    learner = learn(made(table, width=64), 10)
    records, targets = read_side(table[1], "validation")
    assert (learner.model().outputs(records).argmax(axis=1) == targets).mean() > 0.92


def test_framework_that_is_not_installed_is_named(tables, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BadInput, match=f"{BACKEND}.*keras is not installed"):
        made(tables["wine"])


def test_both_lock_files_have_the_same_versions():
    root = Path(__file__).parents[3]
    found = []
    for name in ("requirements.lock", "tensorflow.lock"):
        pins = re.findall(r"^(\S+)==(\S+)", (root / name).read_text(), re.MULTILINE)
        found.append({package: {v for p, v in pins if p == package} for package, _ in pins})
    ours, theirs = found
    assert "tensorflow-cpu" in theirs.keys() - ours.keys()
    assert {
        name: theirs[name] for name in theirs.keys() & ours.keys() if theirs[name] - ours[name]
    } == {}


@pytest.mark.long
def test_labels_have_a_network_each_which_resumes_and_exports_what_was_validated(tmp_path):
    config, data = prepared(tmp_path, labeled_table(), *SETS)
    whole, second = learn(made((config, data)), 3), made((config, data))
    second.restore({key: it.copy() for key, it in learn(made((config, data)), 1).state().items()})
    assert np.array_equal(learn(second, 2).held_out(), whole.held_out())
    (tmp_path / "model").mkdir()
    whole.export(tmp_path / "model")
    records, _ = read_side(data, "validation")
    found = np.exp(load(tmp_path / "model").outputs(records))
    np.testing.assert_allclose(found, 1 / (1 + np.exp(-whole.held_out())), atol=1e-12)
    assert learn(whole, 20).validate(())["micro_f1"] > 0.6
