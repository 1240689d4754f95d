"""A real MLflow server behind a faulty network: each point arrives exactly once."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from mlflow.exceptions import MlflowException

from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.errors import TrackingError
from steadytrain.components.shared.events import read_events
from steadytrain.components.shared.events.types import Warned
from steadytrain.components.shared.retry import waiting
from steadytrain.components.shared.tracking import MlflowSink, finish_run, pull_sink
from steadytrain.components.shared.tracking import finish as finish_module
from steadytrain.components.shared.tracking import notes as notes_module
from steadytrain.components.shared.tracking import notes as spool_module
from steadytrain.components.shared.tracking.connect import open_tracking, short_timeouts
from steadytrain.components.shared.tracking.notes import exclusive
from steadytrain.components.shared.workspace import Workspace

from support.command import wait_for
from support.proxy import Proxy
from support.tracking import ended, started, steps


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "5")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR", "0")
    monkeypatch.setattr(pull_sink, "FIRST_DELAY_SECONDS", 0.05)
    monkeypatch.setattr(pull_sink, "LAST_DELAY_SECONDS", 0.2)
    # A busy machine may miss the timeout of requests, which doesn't mean that nobody answers.
    monkeypatch.setattr(pull_sink, "CLOSE_SECONDS_UNANSWERED", 600.0)


@pytest.fixture
def config(make_config: Callable[..., RunConfig], proxy: Proxy) -> RunConfig:
    return make_config(tracking={"uri": proxy.uri, "experiment": f"{time.time_ns()}"})


@pytest.fixture
def workspace(config: RunConfig) -> Workspace:
    workspace = Workspace.of(config)
    workspace.create()
    return workspace


class Story:
    """The events of a run, emitted as the supervisor does."""

    def __init__(self, config: RunConfig, workspace: Workspace) -> None:
        self.config, self.workspace = config, workspace
        self.stream = workspace.stream("supervisor")

    def tell(self, *events: Any) -> None:
        for event in events:
            self.stream.emit(event)

    def runs(self) -> list[Any]:
        tracking = open_tracking(self.config, self.workspace)
        return list(tracking.client.search_runs([tracking.experiment_id]))

    def points(self, name: str = "loss") -> list[int]:
        """Return the sorted steps of all points of all attempts."""
        client = open_tracking(self.config, self.workspace).client
        attempts = [run for run in self.runs() if run.info.run_name.startswith("attempt")]
        return sorted(
            point.step
            for run in attempts
            for point in client.get_metric_history(run.info.run_id, name)
        )

    def warnings(self) -> list[str]:
        events = read_events(self.workspace.events)
        return [event.message for event in events if isinstance(event, Warned)]


@pytest.fixture
def story(config: RunConfig, workspace: Workspace) -> Iterator[Story]:
    story = Story(config, workspace)
    yield story
    story.stream.close()


@pytest.mark.parametrize(
    ("request_", "fault"),
    [
        ("runs/create", "lose"),
        pytest.param("runs/create", "hang", marks=pytest.mark.slow),
        pytest.param("runs/log-batch", "lose", marks=pytest.mark.slow),
        pytest.param("runs/log-batch", "truncate", marks=pytest.mark.slow),
        pytest.param("", "500", marks=pytest.mark.slow),
        pytest.param("", "503", marks=pytest.mark.slow),
        ("", "reset"),
        pytest.param("", "hang", marks=pytest.mark.slow),
    ],
)
def test_each_point_arrives_once(story: Story, proxy: Proxy, request_: str, fault: Any) -> None:
    proxy.concerns = lambda method, path: request_ in path and method == "POST"
    proxy.queued.extend([fault] * (2 if fault == "hang" else 3))
    story.tell(started(1), *steps(1, range(5)))
    sink = MlflowSink(story.config, story.workspace, batch_seconds=0.05, close_seconds=600)
    wait_for(lambda: not proxy.queued)
    proxy.queued.extend([fault])
    story.tell(*steps(1, range(5, 9)), ended(1, "finished"))
    sink.close()
    proxy.queued.clear()
    assert finish_run(story.config, story.workspace, ok=True)
    assert story.points() == list(range(9))
    assert story.points("grad_norm") == list(range(9))
    names = {run.info.run_name: run.info.status for run in story.runs()}
    assert names == {"attempt-1": "FINISHED", story.config.run_id: "FINISHED"}
    assert len(story.runs()) == 2


def test_parameters_of_a_model_whose_answer_was_lost_are_there_once(
    story: Story, proxy: Proxy
) -> None:
    """MLflow rejects the second request, which ended the register step."""
    tracking = open_tracking(story.config, story.workspace)
    model = tracking.client.create_logged_model(tracking.experiment_id)
    proxy.concerns = lambda _, path: path.endswith("/params")
    proxy.queued.append("lose")
    with waiting(30.0):
        tracking.client.log_model_params(model.model_id, {"a": "1"})
    assert not proxy.queued
    assert tracking.client.get_logged_model(model.model_id).params == {"a": "1"}
    with pytest.raises(MlflowException, match="UNIQUE"), waiting(30.0):
        tracking.client.log_model_params(model.model_id, {"a": "2"})


@pytest.mark.slow
def test_run_that_the_server_created_too_late_is_deleted(story: Story, proxy: Proxy) -> None:
    story.tell(started(1), *steps(1, range(3)))
    MlflowSink(story.config, story.workspace, batch_seconds=0.05, close_seconds=600).close()
    first = next(run for run in story.runs() if run.info.run_name == "attempt-1")
    tracking = open_tracking(story.config, story.workspace)
    tags = {name: text for name, text in first.data.tags.items() if "mark" in name}
    tracking.client.create_run(tracking.experiment_id, tags=tags, run_name="attempt-1")
    assert len(story.runs()) == 3
    assert finish_run(story.config, story.workspace, ok=True)
    assert first.info.run_id in [run.info.run_id for run in story.runs()]
    assert len(story.runs()) == 2


@pytest.mark.slow
def test_attempt_whose_run_was_deleted_is_sent_again(story: Story, proxy: Proxy) -> None:
    story.tell(started(1), *steps(1, range(3)))
    MlflowSink(story.config, story.workspace, batch_seconds=0.05, close_seconds=600).close()
    first = next(run for run in story.runs() if run.info.run_name == "attempt-1")
    open_tracking(story.config, story.workspace).client.delete_run(first.info.run_id)
    story.tell(*steps(1, range(3, 6)), ended(1, "finished"))
    assert finish_run(story.config, story.workspace, ok=True)
    assert story.points() == [3, 4, 5]


@pytest.mark.slow
def test_server_down_all_along_gets_everything_from_the_next_supervisor(
    story: Story, proxy: Proxy
) -> None:
    proxy.usual = "reset"
    first = MlflowSink(story.config, story.workspace, batch_seconds=0.05, close_seconds=600)
    story.tell(started(1), *steps(1, range(4)))
    wait_for(lambda: story.warnings())
    story.tell(ended(1, "preempted"))
    first.close()
    assert not finish_run(story.config, story.workspace, ok=False)

    proxy.usual = "forward"
    story.tell(started(2), *steps(2, range(4, 8)), ended(2, "finished"))
    MlflowSink(story.config, story.workspace, batch_seconds=0.05, close_seconds=600).close()
    assert story.points() == list(range(8))


def test_closing_does_not_wait_for_a_server_that_never_answered(
    story: Story, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Request timeouts cannot end the wait, so the sink's other limit must."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "600")
    monkeypatch.setattr(pull_sink, "CLOSE_SECONDS_UNANSWERED", 0.1)
    proxy.queued.append("500")
    proxy.usual = "hang"
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    sink = MlflowSink(story.config, story.workspace, batch_seconds=0.05, close_seconds=600)
    wait_for(lambda: story.warnings())
    sink.close()
    assert sink._thread.alive


def test_closing_waits_for_a_bounded_time(
    story: Story, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "600")
    monkeypatch.setattr(finish_module, "FINISH_SECONDS", 0.2)
    proxy.usual = "hang"
    assert not finish_run(story.config, story.workspace, ok=True)
    assert "did not accept everything" in story.warnings()[0]


@pytest.mark.slow
def test_backlog_takes_little_memory(story: Story, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spool_module, "BATCH_EVENTS", 7)
    story.tell(started(1), *steps(1, range(50)), ended(1, "finished"))
    MlflowSink(story.config, story.workspace, batch_seconds=0.05, close_seconds=600).close()
    assert story.points() == list(range(50))


def test_one_process_sends_at_a_time(story: Story, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notes_module, "TURN_SECONDS", 0.1)
    story.tell(started(1))
    with exclusive(story.workspace, "telling"):
        assert not finish_run(story.config, story.workspace, ok=True)
    assert "another process" in story.warnings()[0]
    with (
        exclusive(story.workspace, "x"),
        pytest.raises(TrackingError),
        exclusive(story.workspace, "x"),
    ):
        pass


def test_short_timeouts_stay_while_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_HTTP_REQUEST_TIMEOUT")
    first, second = short_timeouts(), short_timeouts()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"] == "5"
    second.__exit__(None, None, None)
    assert "MLFLOW_HTTP_REQUEST_TIMEOUT" not in os.environ
