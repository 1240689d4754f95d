"""A study in MLflow: nested runs, none twice, and no waiting for a server."""

from __future__ import annotations

import socket

import mlflow
import pytest

from steadytrain.components.shared.config import load
from steadytrain.components.shared.tracking.notes import recall, remember
from steadytrain.components.shared.tracking.pull_sink import PullSink
from steadytrain.components.shared.tracking.run import MARK
from steadytrain.components.tune.driver import drive
from steadytrain.components.tune.log import MemoryLog
from steadytrain.components.tune.study import Study, study_name
from steadytrain.components.tune.tracking import StudyTracker, tracked

from support.stores import copy_store
from support.synthetic_trials import SPACE, Quiet, SyntheticTrials, World


def settings_of(folder, *overrides, trials=6):
    return load(
        "causal-lm",
        [
            ("output", str(folder)),
            ("tune.space", SPACE),
            "training.max_steps=90",
            "training.eval_steps=10",
            "tune.pruner=asha",
            ("tune.budget.trials", trials),
            *overrides,
        ],
    )


def driven(config, log, world):
    study = Study(config, log)
    with tracked(study, Quiet()) as watchers:
        drive(study, SyntheticTrials(world), watchers, lambda: None, poll_seconds=0)
    return study


@pytest.fixture(scope="module")
def store(tmp_path_factory, empty_store):
    """A study, continued by another driver with a larger budget, and once more by a third."""
    folder = tmp_path_factory.mktemp("tracked")
    uri, log, world = copy_store(empty_store, folder), MemoryLog(), World(failing={2: "gpu_oom"})
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("MLFLOW_RUN_ID", raising=False)
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        driven(settings_of(folder), log, world)
        for _ in range(2):
            study = driven(settings_of(folder, trials=9), log, world)
        client = mlflow.MlflowClient(uri)
        found = client.search_runs([client.get_experiment_by_name("steadytrain").experiment_id])
        yield study, client, {run.info.run_name: run for run in found}, len(found)


@pytest.mark.slow
def test_each_trial_is_nested_once_in_the_study(store):
    study, _, runs, count = store
    parent = runs[study_name(study.config)]
    assert count == 1 + 9
    assert parent.info.status == "FINISHED"
    assert parent.data.tags["steadytrain.best_trial"].isdecimal()
    trials = [run for name, run in runs.items() if name.startswith("trial")]
    assert {run.data.tags["mlflow.parentRunId"] for run in trials} == {parent.info.run_id}


def test_trials_have_their_parameters_points_and_standing(store):
    study, client, runs, _ = store
    for trial in study.history.trials:
        run = runs[f"trial {trial.number}"]
        rate = trial.params["training.learning_rate"]
        assert float(run.data.params["training.learning_rate"]) == pytest.approx(rate)
        assert run.data.tags["steadytrain.status"] == trial.status
        points = client.get_metric_history(run.info.run_id, "loss") if trial.curve else []
        assert [(point.step, point.value) for point in points] == [
            (step, pytest.approx(metrics["loss"])) for step, metrics in trial.curve
        ]
        ended = trial.status != "paused"
        assert run.data.metrics.get("fit_seconds") == (trial.seconds if ended else None)
    assert runs["trial 2"].info.status == "FAILED"
    assert runs["trial 2"].data.tags["steadytrain.failure"] == "gpu_oom"


def test_points_that_are_sent_again_are_the_same_points(store):
    study, client, runs, _ = store
    tracker = StudyTracker(study.config, every_seconds=60)
    for note in (tracker._workspace.tracking / "sent").iterdir():
        note.unlink()
    tracker.close(study, ok=True)
    run = next(run for run in runs.values() if run.data.params.get("training.learning_rate"))
    points = client.get_metric_history(run.info.run_id, "loss")
    assert len({point.step for point in points}) == len(points)


def test_study_is_nested_in_the_run_that_is_set(store, monkeypatch):
    study, client, runs, _ = store
    outer = runs[study_name(study.config)].info.run_id
    monkeypatch.setenv("MLFLOW_RUN_ID", outer)
    config = study.config.model_copy(update={"run": "inner"})
    inner = driven(config, MemoryLog(), World())
    found = client.search_runs([runs["trial 0"].info.experiment_id], "run_name = 'inner'")
    assert [run.data.tags["mlflow.parentRunId"] for run in found] == [outer]
    assert inner.history.trials


@pytest.mark.timeout(300)  # MLflow itself waits for minutes
def test_server_that_hangs_does_not_delay_the_study(tmp_path, monkeypatch):
    monkeypatch.delenv("MLFLOW_RUN_ID", raising=False)
    monkeypatch.setitem(PullSink.__init__.__kwdefaults__, "close_seconds", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        config = settings_of(tmp_path, ("tracking.uri", address))
        study = driven(config, MemoryLog(), World())
    assert len(study.history.trials) == 6


def test_trial_whose_note_is_lost_is_not_created_again(store):
    """As if the driver had died before it noted the run, and the store had made one more."""
    study, client, runs, _ = store
    tracker = StudyTracker(study.config, every_seconds=60)
    noted = runs["trial 1"]
    double = client.create_run(noted.info.experiment_id, tags=dict(noted.data.tags))
    remember(tracker._workspace, "trial-000001", "")
    for note in (tracker._workspace.tracking / "sent").iterdir():
        note.unlink()
    tracker.close(study, ok=True)
    found = client.search_runs([noted.info.experiment_id])
    mine = [it for it in found if it.data.tags.get(MARK) == noted.data.tags[MARK]]
    kept = {noted.info.run_id, double.info.run_id} & {it.info.run_id for it in mine}
    assert len(mine) == len(kept) == 1
    assert recall(tracker._workspace, "trial-000001") in kept


def test_trial_that_was_not_started_is_only_counted(tmp_path, monkeypatch, empty_store):
    monkeypatch.delenv("MLFLOW_RUN_ID", raising=False)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    config = settings_of(tmp_path)
    study = Study(config, MemoryLog())
    drive(study, SyntheticTrials(World()), Quiet(), lambda: None, poll_seconds=0)
    study.history.trials[4].status = "skipped"
    uri = copy_store(empty_store, tmp_path)
    StudyTracker(config, every_seconds=60).close(study, ok=True)
    client = mlflow.MlflowClient(uri)
    found = client.search_runs([client.get_experiment_by_name("steadytrain").experiment_id])
    runs = {run.info.run_name: run for run in found}
    assert {*runs} == {study_name(config), *(f"trial {n}" for n in (0, 1, 2, 3, 5))}
    assert runs[study_name(config)].data.tags["steadytrain.trials_not_started"] == "1"
