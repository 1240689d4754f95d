"""The sink of a training run, with MLflow in every state it can be in."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import pytest

from steadytrain.components.shared.batch import BatchSettings
from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.events import Event, read_events
from steadytrain.components.shared.events.types import (
    Adjusted,
    AttemptOutcome,
    CheckpointSaved,
    NoiseScaleMeasured,
    RankUsage,
    TrainingStarted,
    Validated,
    Warned,
)
from steadytrain.components.shared.tracking import MlflowSink, finish_run, parent_run
from steadytrain.components.shared.tracking.connect import open_tracking
from steadytrain.components.shared.workspace import Workspace
from steadytrain.components.sizing.recipe import recipe_of_run

from support.command import wait_for
from support.decided import halved
from support.tracking import BEGAN, ended, started, steps

ADJUSTED = "steadytrain.adjusted.training.learning_rate.3"
CHANGE = Adjusted(
    time=BEGAN + 2000,
    attempt=2,
    step=3,
    field="training.learning_rate",
    value=1e-5,
    before=1e-4,
    after=1e-5,
    request="a",
)

SHORTENED = replace(
    halved(size=2, attempt=2),
    batch=BatchSettings(2, sequence_length=64),
    reason="sequences shortened from 128 to 64 tokens",
)


def children(config: RunConfig, workspace: Workspace) -> dict[str, Any]:
    """Return the runs of the attempts by name."""
    tracking = open_tracking(config, workspace)
    parent = parent_run(config, workspace)
    found = tracking.client.search_runs(
        [tracking.experiment_id], f"tags.mlflow.parentRunId = '{parent}'"
    )
    return {run.info.run_name: run for run in found}


def points(config: RunConfig, workspace: Workspace, attempt: int, name: str) -> list[int]:
    """Return the sorted steps of a metric's history, including duplicates."""
    run = children(config, workspace)[f"attempt-{attempt}"]
    client = open_tracking(config, workspace).client
    return sorted(item.step for item in client.get_metric_history(run.info.run_id, name))


def warnings(workspace: Workspace) -> list[str]:
    return [event.message for event in read_events(workspace.events) if isinstance(event, Warned)]


def curve(config: RunConfig, workspace: Workspace, name: str) -> list[tuple[int, float]]:
    """Return the steps and values of one of the run's own metrics, in the order of arrival."""
    client = open_tracking(config, workspace).client
    history = client.get_metric_history(parent_run(config, workspace), name)
    return [(item.step, item.value) for item in history]


class Supervised:
    """A stream like the supervisor's: the events file, and MLflow."""

    def __init__(self, config: RunConfig, workspace: Workspace, **limits: Any) -> None:
        limits = {"batch_seconds": 0.05, "close_seconds": 600, **limits}
        self.sink = MlflowSink(config, workspace, **limits)
        self.stream = workspace.stream("supervisor")

    def tell(self, *events: Event) -> None:
        for event in events:
            self.stream.emit(event)

    def close(self) -> None:
        self.stream.close()
        self.sink.close()


@pytest.mark.slow
def test_run_carries_one_curve_over_its_attempts(config: RunConfig, workspace: Workspace) -> None:
    """Each attempt here has a supervisor of its own, and the second repeats two steps."""
    for events in (
        [started(1), *steps(1, range(1, 6)), ended(1, "failed")],
        [started(2), *steps(2, range(4, 8)), *steps(2, [8], loss=math.nan), ended(2, "failed")],
        [started(3), *steps(3, [8, 9]), ended(3, "finished")],
    ):
        run = Supervised(config, workspace)
        run.tell(*events)
        run.close()
    assert curve(config, workspace, "loss") == [(step, 1 / (step + 1)) for step in range(1, 10)]
    assert points(config, workspace, 1, "loss") == [1, 2, 3, 4, 5]
    assert points(config, workspace, 2, "loss") == [4, 5, 6, 7, 8]
    assert points(config, workspace, 3, "loss") == [8, 9]


@pytest.mark.parametrize("lost", ["told", "curve"])
def test_run_has_each_step_once_after_a_note_was_lost(
    config: RunConfig, workspace: Workspace, lost: str
) -> None:
    run = Supervised(config, workspace)
    run.tell(started(1), *steps(1, range(1, 6)))
    run.close()
    (workspace.tracking / parent_run(config, workspace) / lost).unlink()
    run = Supervised(config, workspace)
    run.tell(*steps(1, [6, 7]), ended(1, "finished"))
    run.close()
    assert [step for step, _ in curve(config, workspace, "loss")] == list(range(1, 8))


@pytest.mark.slow
def test_each_attempt_is_a_child_with_its_metrics(config: RunConfig, workspace: Workspace) -> None:
    run = Supervised(config, workspace)
    run.tell(
        started(1),
        TrainingStarted(
            attempt=1,
            step=0,
            max_steps=20,
            parameters=7,
            device="cpu",
            precision="fp32",
            recipe=[asdict(item) for item in recipe_of_run(config, 7)],
        ),
        *(
            replace(step, communication_wait=0.25, gpu_utilization=0.5)
            for step in steps(1, range(3))
        ),
        Validated(attempt=1, step=2, epoch=0.1, metrics={"loss": 2.5, "f1(macro)": 0.5}, best=True),
        CheckpointSaved(attempt=1, step=2, checkpoint="c", bytes=1, seconds=0.1),
        *(
            NoiseScaleMeasured(
                attempt=1, step=step, noise=1.0, signal=0.1, critical_batch_size=size
            )
            for step, size in ((0, None), (2, 80.0))
        ),
        *(
            RankUsage(attempt=1, rank=rank, sample=2, memory_used=rank + 5, cores_used=1.5)
            for rank in (0, 1)
        ),
        halved(size=2),
        ended(1, "failed", failure_class="host_oom", message="killed", remedy="more memory"),
        started(2),
        CHANGE,
        SHORTENED,
        *steps(2, [3, 4]),
        *steps(2, [5], loss=math.nan),
        ended(2, "finished"),
    )
    run.close()

    found = children(config, workspace)
    assert set(found) == {"attempt-1", "attempt-2"}
    first, second = found["attempt-1"], found["attempt-2"]
    assert (first.info.status, second.info.status) == ("FAILED", "FINISHED")
    assert first.info.start_time == (BEGAN + 1000) * 1000
    assert first.info.end_time == (BEGAN + 1900) * 1000
    assert first.data.params["micro_batch_size"] == "4"
    assert first.data.params["parameters"] == "7"
    assert first.data.params["training.learning_rate"] == "0.0001"
    parent = open_tracking(config, workspace).client.get_run(parent_run(config, workspace))
    assert parent.data.params["training.learning_rate"] == "0.0001"
    for run_with_it in (second, parent):
        assert run_with_it.data.tags[ADJUSTED] == CHANGE.change
    assert parent.data.tags["steadytrain.shortened"] == SHORTENED.reason
    assert ADJUSTED not in first.data.tags
    assert first.data.tags["steadytrain.failure_class"] == "host_oom"
    assert first.data.tags["steadytrain.micro_batch_size"] == "2"
    assert first.data.tags["steadytrain.decision"] == "smaller micro-batch: 2"
    assert first.data.metrics["eval_loss"] == 2.5
    assert first.data.metrics["eval_f1_macro_"] == 0.5
    assert first.data.metrics["learning_rate"] == 1e-3
    assert first.data.metrics["communication_wait"] == 0.25
    assert first.data.metrics["gpu_utilization"] == 0.5
    assert first.data.metrics["system/rank-1/memory_used"] == 6
    assert points(config, workspace, 1, "system/rank-0/cores_used") == [2]
    assert points(config, workspace, 1, "critical_batch_size") == [2]
    assert not {"communication_wait", "gpu_utilization"} & second.data.metrics.keys()
    assert math.isnan(second.data.metrics["loss"])
    assert points(config, workspace, 1, "loss") == [0, 1, 2]
    assert points(config, workspace, 2, "loss") == [3, 4, 5]
    assert warnings(workspace) == []


@pytest.mark.parametrize(
    ("outcome", "status"),
    [
        ("finished", "FINISHED"),
        ("early_stopped", "FINISHED"),
        ("pruned", "FINISHED"),
        ("preempted", "KILLED"),
        ("stopped", "KILLED"),
        ("failed", "FAILED"),
    ],
)
def test_every_outcome_has_a_status(
    config: RunConfig, workspace: Workspace, outcome: AttemptOutcome, status: str
) -> None:
    run = Supervised(config, workspace)
    run.tell(started(1), ended(1, outcome))
    run.close()
    assert children(config, workspace)["attempt-1"].info.status == status


@pytest.mark.slow
def test_more_points_than_mlflow_takes_at_once(config: RunConfig, workspace: Workspace) -> None:
    run = Supervised(config, workspace)
    run.tell(started(1), *steps(1, range(1500)))
    run.close()
    assert points(config, workspace, 1, "loss") == list(range(1500))


@pytest.mark.parametrize("store", ["database", "files"])
def test_resent_points_are_not_duplicated(
    make_config: Callable[..., RunConfig],
    workspace: Workspace,
    monkeypatch: pytest.MonkeyPatch,
    store: str,
) -> None:
    """MLflow accepted everything, and the supervisor died before it recorded that.

    Unlike a database, a file store keeps a point as often as it is sent.
    """
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    uri = (workspace.output / "mlruns").as_uri() if store == "files" else None
    config = make_config(tracking={"uri": uri})
    run = Supervised(config, workspace)
    run.tell(started(1), *steps(1, range(5)), ended(1, "finished"))
    run.close()
    for note in workspace.tracking.glob("*/told"):
        note.unlink()
    assert finish_run(config, workspace, ok=True)
    assert points(config, workspace, 1, "loss") == list(range(5))
    assert len(children(config, workspace)) == 1


@pytest.mark.slow
def test_server_killed_in_mid_run_and_back_at_the_end(
    make_config: Callable[..., RunConfig], server: Any
) -> None:
    config = make_config(tracking={"uri": server.uri})
    workspace = Workspace.of(config)
    workspace.create()
    server.start()
    parent_run(config, workspace)
    run = Supervised(config, workspace)
    run.tell(started(1), *steps(1, range(5)))
    wait_for(lambda: "attempt-1" in children(config, workspace))
    wait_for(lambda: points(config, workspace, 1, "loss") == list(range(5)))

    server.kill()
    run.tell(*steps(1, range(5, 10)))
    wait_for(lambda: warnings(workspace))
    run.tell(*steps(1, range(10, 15)), ended(1, "finished"))
    run.close()
    assert len(warnings(workspace)) == 1
    # The kill may meet a request or its response on the way.
    lost = "Connection (refused|reset)|Remote end closed|IncompleteRead"
    assert re.search(lost, warnings(workspace)[0])

    server.start()
    assert points(config, workspace, 1, "loss") == list(range(5))
    assert finish_run(config, workspace, ok=True)
    assert points(config, workspace, 1, "loss") == list(range(15))
    assert children(config, workspace)["attempt-1"].info.status == "FINISHED"


@pytest.mark.slow
def test_server_that_comes_up_in_mid_run_gets_everything(
    make_config: Callable[..., RunConfig], server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("steadytrain.components.shared.tracking.pull_sink.LAST_DELAY_SECONDS", 1.0)
    config = make_config(tracking={"uri": server.uri})
    workspace = Workspace.of(config)
    workspace.create()
    run = Supervised(config, workspace)
    run.tell(started(1), *steps(1, range(5)))
    wait_for(lambda: warnings(workspace))
    server.start()
    wait_for(lambda: not run.sink._retry.failures)
    run.tell(*steps(1, range(5, 10)), ended(1, "finished"))
    run.close()
    assert points(config, workspace, 1, "loss") == list(range(10))
    assert len(warnings(workspace)) == 1


def test_server_that_hangs_delays_nothing(
    make_config: Callable[..., RunConfig], silent_uri: str
) -> None:
    config = make_config(tracking={"uri": silent_uri})
    workspace = Workspace.of(config)
    workspace.create()
    run = Supervised(config, workspace, close_seconds=0.5)
    run.tell(started(1), *steps(1, range(1000)), ended(1, "finished"))
    run.close()
    assert len(warnings(workspace)) == 1
    assert "has not answered" in warnings(workspace)[0]


def test_broken_server_is_reported_once(
    make_config: Callable[..., RunConfig],
    answer: Callable[[int, str], str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setattr("steadytrain.components.shared.tracking.pull_sink.FIRST_DELAY_SECONDS", 0.0)
    config = make_config(tracking={"uri": answer(500, "broken")})
    workspace = Workspace.of(config)
    workspace.create()
    run = Supervised(config, workspace)
    run.tell(started(1))
    wait_for(lambda: warnings(workspace))
    run.tell(*steps(1, range(3)))
    run.close()
    assert len(warnings(workspace)) == 1


@pytest.mark.slow
def test_next_supervisor_sends_what_a_killed_one_owed(
    config: RunConfig, workspace: Workspace
) -> None:
    """Its events are in the file, but its sink never sent them."""
    stream = workspace.stream("supervisor")
    for event in [started(1), *steps(1, range(4))]:
        stream.emit(event)
    stream.close()

    second = Supervised(config, workspace)
    second.tell(started(2), *steps(2, [4, 5]), ended(2, "finished"))
    second.close()
    assert points(config, workspace, 1, "loss") == [0, 1, 2, 3]
    assert points(config, workspace, 2, "loss") == [4, 5]
    assert finish_run(config, workspace, ok=True)
    assert children(config, workspace)["attempt-1"].info.status == "KILLED"
