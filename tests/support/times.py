"""A stopwatch for a run, to check the ledger's times against."""

from __future__ import annotations

import time
from itertools import pairwise

import pytest

from steadytrain.components.shared.events import Event, read_events
from steadytrain.components.shared.events.types import (
    AttemptEnded,
    AttemptStarted,
    CheckpointSaved,
    TrainingStarted,
)
from steadytrain.components.shared.workspace import Workspace
from steadytrain.components.train.recovery.history import History
from steadytrain.components.train.recovery.ledger import Ledger
from steadytrain.components.train.recovery.times import Span, Times, spans


class Stopwatch:
    """A sink that records, on its own clock, the first attempt's start and the last one's end."""

    def __init__(self) -> None:
        self.began = self.ended = 0.0

    def emit(self, event: Event) -> None:
        if isinstance(event, AttemptStarted):
            self.began = self.began or time.monotonic()
        elif isinstance(event, AttemptEnded):
            self.ended = time.monotonic()

    def close(self) -> None:
        pass

    @property
    def seconds(self) -> float:
        return self.ended - self.began


def told_spans(workspace: Workspace) -> list[Span]:
    """Return the time spans computed from the ledger alone."""
    return spans(told_history(workspace))


def told_history(workspace: Workspace) -> History:
    return Ledger(workspace).history()


def assert_times_add_up(workspace: Workspace, seconds: float) -> Times:
    """Assert that the spans have no gaps and match the stopwatch (within 1%) and the events."""
    cut = told_spans(workspace)
    assert all(before.end == after.start for before, after in pairwise(cut))
    times = Times.of(cut)
    assert times.wall == pytest.approx(seconds, rel=0.01)
    events = read_events(workspace.events)
    saved = sum(event.seconds for event in events if isinstance(event, CheckpointSaved))
    assert times.checkpointing == pytest.approx(saved, abs=1e-3)
    begun = {event.attempt: event.time for event in events if isinstance(event, AttemptStarted)}
    ready = {event.attempt: event.time for event in events if isinstance(event, TrainingStarted)}
    starting = sum(ready[attempt] - begun[attempt] for attempt in ready)
    assert times.restarting == pytest.approx(starting, abs=1e-3)
    return times
