"""A task of another package, whose records are numbers, goes through the whole DAG."""

from __future__ import annotations

import contextlib
import json
import math
import re
import subprocess
import sys

import psutil
import pytest
import yaml

from steadytrain.components.shared.digest import weights_digest
from steadytrain.components.shared.records import (
    DataRecord,
    EvaluationRecord,
    GateRecord,
    RegistrationRecord,
)
from steadytrain.components.shared.workspace import Workspace

from support.command import TINY_MODEL, TINY_RUN, Command, paused_rank
from support.plugins import install_example
from support.snippets import ROOT, blocks
from support.stores import with_store
from support.training import losses_of

FEATURES = ["age", "sex", "bmi", "bp", "s1", "s2", "s3", "s4", "s5", "s6"]
BAD = [{**dict.fromkeys(FEATURES, 0.0), "progression": "high"}, {"age": 1.0}]
CONFIG = {
    "name": "diabetes",
    "data": {
        "task": "regression",
        "source": ["diabetes.jsonl"],
        "task_options": {"features": FEATURES, "target": "progression"},
        "test_share": 0.25,
        "validation_share": 0.15,
    },
    "model": {"config": {"model_type": "perceptron", "hidden": 16}},
    "training": {
        "max_steps": 300,
        "global_batch_size": 32,
        "learning_rate": 0.015,
        "eval_steps": 100,
        "save_steps": 100,
        "logging_steps": 100,
    },
    "evaluation": {"bootstrap_samples": 200},
    "gate": {"metric": "progression_rmse", "floors": {"progression_rmse": 70.0}},
}


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    return {"PYTHONPATH": str(install_example(tmp_path_factory.mktemp("example")))}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Scikit-learn's diabetes data and two bad records as JSON Lines, and the configuration."""
    from sklearn.datasets import load_diabetes

    folder = tmp_path_factory.mktemp("diabetes")
    features, target = load_diabetes(return_X_y=True, scaled=False)
    rows = [
        {**dict(zip(FEATURES, map(float, values), strict=True)), "progression": float(goal)}
        for values, goal in zip(features, target, strict=True)
    ]
    lines = map(json.dumps, [*rows, *BAD])
    (folder / "diabetes.jsonl").write_text("\n".join(lines), encoding="utf-8")
    (folder / "diabetes.yaml").write_text(yaml.safe_dump(CONFIG))
    return folder


@pytest.fixture(scope="module")
def finished(folder, installed, empty_store):
    """An undisturbed run."""
    steadytrain = Command(with_store(folder / "undisturbed", empty_store))
    done = steadytrain.run("diabetes.yaml", **installed)
    assert done.code == 0, done.out + done.err
    return done


def record(done, name, kind):
    run, *_ = done.runs
    return kind.load(run / "records" / f"{name}.json")


def test_records_of_numbers_are_checked_split_and_prepared(finished):
    data = record(finished, "preprocess", DataRecord)
    assert sum(side.documents for side in data.sides.values()) == 442
    assert data.sides["train"].target_tokens == data.sides["train"].rows > 200
    assert (data.tokenizer, data.sequence_length, data.labels) == ("", 0, [])
    told = [json.loads(line) for line in data.path("quarantine.jsonl").read_text().splitlines()]
    assert [(one["reason"], one["detail"]) for one in told] == [
        ("wrong_type", "progression is 'high', not a finite number"),
        ("missing_field", "sex is absent or null"),
    ]
    card = json.loads(data.path("card.json").read_text())
    assert card["task"] == "regression"
    # No near duplicates are looked for, and no words are counted.
    assert card["duplicates"]["near_duplicate"] == 0
    assert not any(map(sum, data.profile.words))
    assert "<dt>tokenizer</dt><dd>none</dd>" in data.path("card.html").read_text()


def test_gate_uses_the_packages_metric(finished):
    evaluation = record(finished, "evaluate", EvaluationRecord)
    decision = record(finished, "gate", GateRecord)
    rmse = evaluation.metrics["progression_rmse"]
    assert rmse.low < rmse.value < rmse.high
    # Always predicting the mean is the baseline.
    assert rmse.value < 0.9 * evaluation.baselines["progression_rmse"]
    assert decision.metric == "progression_rmse"
    assert decision.candidate == rmse.value
    assert decision.promoted
    assert "rmse" in finished.out


def test_registered_model_loads_back_and_predicts(folder, finished, installed):
    version = record(finished, "promote", RegistrationRecord)
    assert version.champion
    first = json.loads((folder / "diabetes.jsonl").read_text().partition("\n")[0])
    features = [first[name] for name in FEATURES]
    code = (
        "import mlflow\n"
        f"mlflow.set_tracking_uri('sqlite:///{finished.output}/mlflow.db')\n"
        f"model = mlflow.pyfunc.load_model('models:/diabetes/{version.version}')\n"
        f"print(*model.predict({[features]}))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=Command(finished.output).environment(**installed),
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) == pytest.approx(first["progression"], abs=150)


def test_killed_run_ends_with_the_same_weights(folder, finished, installed):
    steadytrain = Command(folder / "killed")
    pause = steadytrain.pause(0)
    paths = (installed["PYTHONPATH"], pause.everywhere["PYTHONPATH"])
    variables = {**pause.everywhere, "PYTHONPATH": ":".join(paths)}
    program = steadytrain.start("diabetes.yaml", **variables)
    paused_rank(pause, program)
    processes = psutil.Process(program.pid).children(recursive=True)
    for process in [psutil.Process(program.pid), *processes]:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    program.communicate()
    assert not psutil.wait_procs(processes, 300)[1]
    assert not list(steadytrain.output.glob("runs/*/model/model.safetensors"))

    done = steadytrain.train("diabetes.yaml", **installed)
    first, *_ = finished.runs
    weights = [weights_digest(folder / "model") for folder in (first, done.runs[0])]
    assert weights[0] == weights[1]


def test_second_model_is_gated_against_the_first(folder, finished, installed):
    second = Command(finished.output).run(
        "diabetes.yaml", "training.max_steps=100", "run=second", **installed
    )
    assert second.code == 0, second.out + second.err
    assert "rmse" in second.out
    assert "against" in second.out


def test_missing_task_options_are_listed(folder, installed):
    options = "data.task_options={features: [age]}"
    refused = Command(folder / "refused").run("diabetes.yaml", options, **installed)
    assert refused.code == 1
    assert "a regression needs features and a target" in refused.err + refused.out


def test_without_the_package_the_task_is_unknown(folder):
    refused = Command(folder / "refused").run("diabetes.yaml")
    assert refused.code == 2
    assert "no installed package has regression in steadytrain.tasks" in refused.err
    assert "causal_lm" in refused.err


@pytest.mark.long
def test_documented_loss_trains_to_its_end(steadytrain):
    """The command of the page, in the folder of its module, on less data and a small model."""
    page = ROOT / "docs" / "extending.md"
    (module,) = (item.text for item in blocks("python") if "class HalfTheLoss" in item.text)
    (name,) = re.findall(r"--set data\.task=(\w+):HalfTheLoss", page.read_text("utf-8"))
    (steadytrain.output.parent / f"{name}.py").write_text(module)
    kinds = ("json", "email", "logging", "importlib")
    done = steadytrain.run(
        "sequence-classification",
        f"data.task={name}:HalfTheLoss",
        f"data.source=[{','.join(f'package:stdlib/{kind}' for kind in kinds)}]",
        "model.base=null",
        "model.config.model_type=bert",
        *(item for item in TINY_MODEL if "key_value" not in item),
        *TINY_RUN,
    )
    assert done.code == 0, done.out + done.err
    assert record(done, "promote", RegistrationRecord).champion
    (run,) = done.runs
    losses = losses_of(Workspace(done.output, run.name))
    assert sorted(losses) == list(range(1, 7))
    # A model with random weights gives each class the same chance.
    assert losses[1] == pytest.approx(math.log(len(kinds)) / 2, abs=0.1)
