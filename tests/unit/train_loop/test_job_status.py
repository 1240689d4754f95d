"""What Kubeflow Trainer's status server gets from rank 0."""

from __future__ import annotations

import math

import pytest

from steadytrain.components.shared.events.types import (
    CheckpointSaved,
    TrainingFinished,
    TrainingStarted,
    TrainingStep,
    Validated,
    Warned,
)
from steadytrain.components.train.loop.job_status import JobStatus, TrainerStatus

from support.forked import ForkedLauncher, train
from support.status_server import status_server
from support.training import Bench, events_of, language_rows, weights_digest, write_data
from support.whole_runs import RECIPE

START = TrainingStarted(
    time=1000, attempt=1, step=20, max_steps=100, parameters=7, device="cpu", precision="fp32"
)


def step(number, *, time, loss=2.5):
    return TrainingStep(
        time=time,
        attempt=1,
        step=number,
        epoch=0.5,
        loss=loss,
        learning_rate=1e-3,
        grad_norm=1.0,
        tokens=10,
        tokens_per_second=123.4567891,
        padding=0.0,
        memory_used=1,
        gpu_memory_used=0,
        data_wait=0.0,
        forward=0.3,
        backward=0.3,
        optimizer=0.3,
    )


def metrics(status):
    return {item["name"]: item["value"] for item in status.as_data()["metrics"]}


def test_status_has_share_rest_and_metrics():
    status = TrainerStatus()
    assert not status.add(CheckpointSaved(attempt=1, step=1, checkpoint="c", bytes=1, seconds=1))
    assert status.add(START)
    assert status.as_data() == {
        "lastUpdatedTime": "1970-01-01T00:16:40Z",
        "progressPercentage": 20,
        "metrics": [],
    }
    assert status.add(step(40, time=1010))
    assert status.add(
        Validated(attempt=1, step=40, epoch=0.5, metrics={"loss": 2.25, "f1": math.nan}, best=True)
    )
    # The server refuses an update with a name of more than 64 characters.
    long = {"x" * 59: 1.0, "x" * 60: 2.0}
    assert status.add(Validated(attempt=1, step=40, epoch=0.5, metrics=long, best=False))
    found = status.as_data()
    # 20 steps in 10 s; 60 are left.
    assert (found["progressPercentage"], found["estimatedRemainingSeconds"]) == (40, 30)
    assert metrics(status) == {
        "step": "40",
        "max_steps": "100",
        "epoch": "0.5",
        "loss": "2.5",
        "learning_rate": "0.001",
        "tokens_per_second": "123.457",
        "eval_loss": "2.25",
        "eval_" + "x" * 59: "1",
    }
    status.add(step(100, time=1040, loss=math.inf))
    assert status.as_data()["progressPercentage"] == 99
    assert "loss" not in metrics(status)
    status.add(TrainingFinished(attempt=1, step=100, outcome="finished", best_step=1, best_score=1))
    found = status.as_data()
    assert (found["progressPercentage"], found["estimatedRemainingSeconds"]) == (100, 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "why"),
    [("refused", "status 403"), ("token", "No such file"), ("authority", "no secure connection")],
)
def test_fault_is_one_warning_and_later_updates_arrive(tmp_path, monkeypatch, fault, why):
    warned = []
    with status_server(tmp_path / "server") as server:
        for name, text in server.variables.items():
            monkeypatch.setenv(name, text)
        if fault == "refused":
            server.refuse = 403
        elif fault == "token":
            monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_TOKEN", str(tmp_path / "none"))
        else:
            monkeypatch.delenv("KUBEFLOW_TRAINER_SERVER_CA_CERT")
        status = JobStatus(warned.append, every=3600, seconds=300)
        status.emit(START)
        status._send()
        status._send()
        assert len(warned) == 1
        assert why in warned[0]
        assert "training continues" in warned[0]
        for name, text in server.variables.items():
            monkeypatch.setenv(name, text)
        server.refuse = 0
        status.close()
        assert [item["progressPercentage"] for item in server.accepted] == [20]


@pytest.mark.slow
def test_last_update_arrives_after_one_that_is_under_way(tmp_path, monkeypatch):
    """Each takes most of the time that an update may take."""
    warned = []
    with status_server(tmp_path / "server") as server:
        for name, text in server.variables.items():
            monkeypatch.setenv(name, text)
        server.delay = 12
        status = JobStatus(warned.append, every=0.01, seconds=22)
        status.emit(START)
        assert server.begun.wait(300)
        status.emit(
            TrainingFinished(attempt=1, step=100, outcome="finished", best_step=1, best_score=1)
        )
        status.close()
        assert [item["progressPercentage"] for item in server.accepted] == [20, 100]
    assert not warned


@pytest.mark.slow
def test_run_posts_its_progress_with_the_same_weights(tmp_path):
    data = write_data(tmp_path / "data", language_rows(60), language_rows(8, seed=1))
    compute = {"device": "cpu", "nproc_per_node": 1, "threads_per_rank": 1}
    told, silent = (
        Bench.make(tmp_path / "output", data, run=name, training=RECIPE, compute=compute)
        for name in ("told", "silent")
    )
    with status_server(tmp_path / "server") as server:
        assert train(told, launcher=ForkedLauncher(**server.variables)).succeeded
    assert not server.refused
    last = server.accepted[-1]
    assert (last["progressPercentage"], last["estimatedRemainingSeconds"]) == (100, 0)
    found = {item["name"]: item["value"] for item in last["metrics"]}
    assert (found["step"], found["max_steps"]) == ("12", "12")
    loss = events_of(told.workspace, TrainingStep)[-1].loss
    assert float(found["loss"]) == pytest.approx(loss, rel=1e-5)
    assert "eval_loss" in found
    assert not [item for item in events_of(told.workspace, Warned) if "TrainJob" in item.message]
    assert train(silent).succeeded
    assert weights_digest(told.workspace) == weights_digest(silent.workspace)
