"""A stopwatch for a run, to check the ledger's times against."""

from __future__ import annotations

import time
from itertools import pairwise

import pytest

from steadytrain.components.shared.events import Event, read_events
from steadytrain.components.shared.events.types import (
    AttemptStarted,
    CheckpointSaved,
    TrainingStarted,
    TrainingStep,
)
from steadytrain.components.shared.workspace import Workspace
from steadytrain.components.train.recovery.history import History
from steadytrain.components.train.recovery.ledger import Ledger
from steadytrain.components.train.recovery.times import Span, Times, spans


class Stopwatch:
    """A sink that measures, on its own clock, bounds of the time between two of a run's events.

    These are the first attempt's start and the last one's end. A sink gets each event after it
    happened, and an attempt ends after the last step that its ranks report.
    """

    def __init__(self) -> None:
        self.made = time.monotonic()
        self.began = self.last = self.stopped = 0.0

    def emit(self, event: Event) -> None:
        if isinstance(event, AttemptStarted):
            self.began = self.began or time.monotonic()
        elif isinstance(event, TrainingStep):
            self.last = time.monotonic()

    def stop(self) -> None:
        self.stopped = time.monotonic()

    def close(self) -> None:
        pass

    @property
    def least(self) -> float:
        return self.last - self.began

    @property
    def most(self) -> float:
        return self.stopped - self.made


def told_spans(workspace: Workspace) -> list[Span]:
    """Return the time spans computed from the ledger alone."""
    return spans(told_history(workspace))


def told_history(workspace: Workspace) -> History:
    return Ledger(workspace).history()


def assert_times_add_up(workspace: Workspace, watch: Stopwatch) -> Times:
    """Assert that the spans have no gaps and match the stopwatch and the events."""
    cut = told_spans(workspace)
    assert all(before.end == after.start for before, after in pairwise(cut))
    times = Times.of(cut)
    assert watch.least <= times.wall <= watch.most
    events = read_events(workspace.events)
    saved = sum(event.seconds for event in events if isinstance(event, CheckpointSaved))
    assert times.checkpointing == pytest.approx(saved, abs=1e-3)
    begun = {event.attempt: event.time for event in events if isinstance(event, AttemptStarted)}
    ready = {event.attempt: event.time for event in events if isinstance(event, TrainingStarted)}
    starting = sum(ready[attempt] - begun[attempt] for attempt in ready)
    assert times.restarting == pytest.approx(starting, abs=1e-3)
    return times
