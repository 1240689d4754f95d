"""A table from a CSV file to a registered model: killed, resumed, gated, and served elsewhere."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pandas as pd
import psutil
import pyarrow.parquet as pq
import pytest

from steadytrain.components.shared.digest import file_digest
from steadytrain.components.shared.records import (
    DataRecord,
    EvaluationRecord,
    GateRecord,
    RegistrationRecord,
    TrainRecord,
)
from steadytrain.components.shared.workspace import Workspace
from steadytrain.components.tabular.learners import read_table
from steadytrain.components.tabular.model import load

from support.command import finish, kill_paused
from support.tables import LINEAR, REGRESSION, shipped, write_csv
from support.without_steadytrain import PROGRAM as WITHOUT_STEADYTRAIN

SERVE = (
    WITHOUT_STEADYTRAIN
    + """import mlflow, pandas
mlflow.set_tracking_uri(sys.argv[1])
frame = pandas.read_csv(sys.argv[3])
found = mlflow.pyfunc.load_model(sys.argv[2]).predict(frame.drop(columns="target"))
print(json.dumps({"prediction": found["prediction"].tolist(), "target": frame["target"].tolist()}))
"""
)


def fields(source, run):
    return (f"data.source=[{source}]", "data.target=target", f"run={run}")


@pytest.fixture
def start(steadytrain):
    """Return a function that starts a run on a table."""

    def started(source, run, *overrides, **environment):
        return steadytrain.start("tabular", *fields(source, run), *overrides, **environment)

    return started


def served(steadytrain, uri, source):
    store = f"sqlite:///{steadytrain.output / 'mlflow.db'}"
    done = subprocess.run(
        [sys.executable, "-c", SERVE, store, uri, str(source)],
        env=steadytrain.environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def peak_of(pid):
    """Return the most memory that a program or one of its children had, once all have ended."""
    most, program = 0, psutil.Process(pid)
    while True:
        try:
            every = [program, *program.children(recursive=True)]
        except psutil.NoSuchProcess:
            return most
        if program.status() == psutil.STATUS_ZOMBIE:
            return most
        for each in every:
            with contextlib.suppress(psutil.NoSuchProcess):
                most = max(most, each.memory_info().rss)
        time.sleep(0.1)


@pytest.mark.slow
def test_table_is_trained_killed_resumed_gated_registered_and_served(start, steadytrain, tmp_path):
    source = write_csv(tmp_path, shipped("breast_cancer"))
    settings = ["training.early_stopping_patience=50", "training.max_steps=40"]
    pause = steadytrain.pause(4)
    killed = start(source, "killed", *settings, "training.save_steps=1", **pause.everywhere)
    workspace = Workspace(steadytrain.output, "killed")
    kill_paused(pause, killed)
    finish(killed)
    # tests/unit/tabular/test_learners.py compares the trees with those of an undisturbed run.
    assert TrainRecord.load(workspace.record("train")).attempts == 2
    evaluation = EvaluationRecord.load(workspace.record("evaluate"))
    assert evaluation.metrics["accuracy"].value > 0.9 > evaluation.baselines["accuracy"]
    registered = RegistrationRecord.load(workspace.record("promote"))
    assert registered.champion
    found = served(steadytrain, registered.model_uri, source)
    hits = [a == b for a, b in zip(found["prediction"], found["target"], strict=True)]
    assert sum(hits) / len(hits) > 0.95
    out = tmp_path / "predictions.parquet"
    address = f"{registered.model_name}@champion"
    done = steadytrain("predict", address, source, "--out", out, "--output", steadytrain.output)
    assert done.code == 0, done.err
    assert pq.read_table(out)["prediction"].to_pylist() == found["prediction"]
    assert "does not read: target" in done.err


@pytest.mark.long
@pytest.mark.parametrize(
    ("framework", "kind"),
    [("xgboost", "xgboost"), ("catboost", "catboost"), ("sklearn", "hist_boosting")],
)
def test_killed_run_of_any_boosting_predicts_the_same(
    framework, kind, start, steadytrain, tmp_path
):
    source = write_csv(tmp_path, shipped("breast_cancer"))
    settings = [
        f"model.framework={framework}",
        f"model.config={{model_type: {kind}}}",
        "training.max_steps=40",
    ]
    # With equal settings, the second run would take the first one's model.
    pause = steadytrain.pause(4)
    killed = start(source, "killed", *settings, "training.save_steps=1", **pause.everywhere)
    kill_paused(pause, killed)
    finish(killed)
    steadytrain.train("tabular", *fields(source, "quiet"), *settings)
    records = shipped("breast_cancer").drop(columns="target").to_dict("records")
    found, files = {}, {}
    for run, attempts in {"killed": 2, "quiet": 1}.items():
        made = Workspace(steadytrain.output, run)
        assert TrainRecord.load(made.record("train")).attempts == attempts
        found[run] = load(made.model).rows(records)
        files[run] = {path.name: file_digest(path) for path in made.model.glob("*.*")}
    assert len(found["killed"]) == 569
    assert found["killed"] == found["quiet"]
    assert files["killed"] == files["quiet"]


@pytest.mark.long
@pytest.mark.parametrize("model", [LINEAR, ["training.max_steps=3"]], ids=["linear", "lightgbm"])
def test_table_of_20000_columns_is_learned_in_little_memory_and_time(
    model, start, steadytrain, tmp_path
):
    """Of genes or sensors, for example. A few columns tell the class."""
    chance = np.random.default_rng(0)
    values = chance.normal(size=(400, 20_000)).round(3)
    frame = pd.DataFrame(values, columns=[f"c{place:05}" for place in range(20_000)])
    signal = values[:, :5].sum(axis=1) + chance.normal(size=400) / 2
    names = {f"s{place}": chance.choice(["low", "mid", "high"], 400) for place in range(20)}
    target = {"target": np.where(signal > 0, "yes", "no")}
    frame = pd.concat([frame, pd.DataFrame({**names, **target})], axis=1)
    source = write_csv(tmp_path, frame)
    began = time.monotonic()
    # A linear model learns nothing from 320 records of that many columns.
    running = start(source, "wide", *model, "gate.beat_baseline=false")
    with ThreadPoolExecutor() as pool:
        peak = pool.submit(peak_of, running.pid)
        finish(running)
        most = peak.result()
    took = time.monotonic() - began
    print(f"{took:.0f} s, {most / 2**30:.2f} GiB")
    assert took < 300
    assert most < 3 * 2**30
    workspace = Workspace(steadytrain.output, "wide")
    data = DataRecord.load(workspace.record("preprocess"))
    assert len(read_table(data).features) == 20_020
    evaluation = EvaluationRecord.load(workspace.record("evaluate"))
    assert evaluation.metrics["loss"].value > 0
    registered = RegistrationRecord.load(workspace.record("promote"))
    rows = frame.head(3).to_dict("records")
    assert len(load(workspace.model).rows(rows)) == 3
    assert registered.champion


@pytest.mark.long
def test_number_is_predicted_by_a_linear_model(start, steadytrain, tmp_path):
    # One column has whole numbers alone, which MLflow takes for no "double".
    table = shipped("diabetes").assign(visits=lambda frame: (frame["bp"] * 100).round().astype(int))
    source = write_csv(tmp_path, table)
    finish(start(source, "numbers", REGRESSION, *LINEAR))
    workspace = Workspace(steadytrain.output, "numbers")
    (why,) = json.loads((workspace.transformers / "training_args.json").read_text())["refused"]
    assert why.startswith("model.framework sklearn: ")
    evaluation = EvaluationRecord.load(workspace.record("evaluate"))
    assert evaluation.metrics["mse"].value < evaluation.baselines["mse"]
    registered = RegistrationRecord.load(workspace.record("promote"))
    found = served(steadytrain, registered.model_uri, source)
    errors = [(a - b) ** 2 for a, b in zip(found["prediction"], found["target"], strict=True)]
    assert sum(errors) / len(errors) < 3500


@pytest.mark.slow
def test_newer_records_replace_a_champion_that_has_seen_none_of_them(steadytrain, tmp_path):
    chance = np.random.default_rng(0)
    x = chance.normal(size=900)
    days = pd.date_range("2024-01-01", periods=900, freq="D").strftime("%Y-%m-%d")
    frame = pd.DataFrame({"day": days, "x": x, "target": 3 * x + chance.normal(size=900)})
    sets = (REGRESSION, "data.columns.time=day", "training.max_steps=1", "model.framework=sklearn")

    def gate(rows, run, model, *more):
        source = write_csv(tmp_path, frame.iloc[:rows])
        kind = f"model.config={{model_type: {model}}}"
        done = steadytrain.run("tabular", *fields(source, run), *sets, kind, *more)
        assert done.code == 0, done.err
        return GateRecord.load(Workspace(steadytrain.output, run).record("gate"))

    # The naive baseline is as good.
    assert gate(600, "first", "dummy", "gate.beat_baseline=false").promoted
    newer = gate(900, "second", "linear")
    assert (newer.promoted, newer.champion_version) == (True, "1")
    assert newer.improvement.value > 0.5
    # Its test side begins before the champion's training ended.
    older = gate(700, "third", "linear")
    assert not older.promoted
    assert "was trained on another split" in older.reason
