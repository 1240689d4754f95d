"""The sinks of a run end together, however many of them hang."""

from __future__ import annotations

import threading

import pytest

from steadytrain.components.shared.config import from_mapping
from steadytrain.components.shared.events import read_events
from steadytrain.components.shared.events.types import Warned
from steadytrain.components.shared.tracking.pull_sink import run_in_parallel
from steadytrain.components.shared.workspace import Workspace
from steadytrain.components.train import step


@pytest.fixture
def never():
    """An event that comes only after the test."""
    event = threading.Event()
    yield event
    event.set()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_work_that_hangs_keeps_nothing_else_waiting(never):
    def fails():
        raise SystemExit(3)

    # One after the other, they would take longer than the test may.
    hanging = {f"hangs {number}": never.wait for number in range(200)}
    failures = run_in_parallel({**hanging, "fails": fails, "works": lambda: None}, lambda _: 20.0)
    assert isinstance(failures.pop("fails"), SystemExit)
    assert failures.keys() == hanging.keys()
    assert {str(error) for error in failures.values()} == {"not done within 20 s"}


def test_sinks_that_hang_share_one_deadline(tmp_path, monkeypatch, never):
    closed = []

    class Sink:
        def __init__(self, name):
            self.name = name

        def emit(self, event):
            pass

        def close(self):
            if self.name in ("mlflow", "otlp", "wandb"):
                never.wait()
            closed.append(self.name)

    monkeypatch.setattr(step, "CLOSE_SECONDS", 20.0)
    monkeypatch.setattr(step, "load_sink", lambda name: lambda *_: Sink(name))
    config = from_mapping(
        {
            "name": "tiny",
            "output": str(tmp_path),
            "data": {"source": ["a.txt"]},
            "model": {"config": {"model_type": "llama"}},
            "tracking": {"sinks": ["mlflow", "otlp", "wandb", "tensorboard"]},
        }
    )
    workspace = Workspace.of(config)
    with step._tracked(config, workspace) as sinks:
        assert len(sinks) == 5
    assert sorted(closed) == ["diagnosis", "tensorboard"]
    told = [event.message for event in read_events(workspace.events) if isinstance(event, Warned)]
    assert len(told) == 3
    assert all(message.endswith("could not be closed: not done within 20 s") for message in told)
