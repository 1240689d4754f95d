"""What a trial's events say about it."""

from __future__ import annotations

import time
from functools import singledispatchmethod
from pathlib import Path

from steadytrain.components.shared.events import Event, read_events
from steadytrain.components.shared.events.types import (
    AttemptEnded,
    AttemptStarted,
    CheckpointSaved,
    DecisionMade,
    LatencyMeasured,
    StepFailed,
    SupervisorStarted,
    TrainingStep,
    Validated,
)
from steadytrain.components.train.attempt import RankError
from steadytrain.components.train.failures import classify
from steadytrain.components.train.recovery.outcome import SUCCESSES
from steadytrain.components.tune.trials.base import Condition, TrialState, Validation


class Curve:
    """A trial as its events describe it. Add them in the order in which they happened."""

    def __init__(self) -> None:
        self._attempt = self._resumed = self._reported = self._saved = 0
        self._validations = dict[int, Validation]()
        self._condition: Condition = "new"
        self._failed: AttemptEnded | None = None
        self._failure = self._error = ""
        self._fallbacks = list[str]()
        self._latency_ms: float | None = None
        self._seconds, self._began, self._latest = 0.0, 0.0, 0.0
        # The same as `_began`, by the monotonic clock.
        self._since = 0.0
        self._prepared: float | None = None

    def state(self, *, running: bool) -> TrialState:
        """Return the trial's state.

        Args:
            running: whether processes train it now.
        """
        condition: Condition = "running" if running else self._condition
        failed = condition == "failed"
        spent = time.monotonic() - self._since if running else self._latest - self._began
        return TrialState(
            condition=condition,
            step=self._reported if running else self._saved,
            validations=tuple(self._validations[step] for step in sorted(self._validations)),
            seconds=self._seconds + (max(0.0, spent) if self._began else 0.0),
            failure=self._failure if failed else "",
            error=self._error if failed else "",
            fallbacks=tuple(self._fallbacks),
            latency_ms=self._latency_ms,
            since_prepared=time.time() - self._prepared if running and self._prepared else None,
        )

    @singledispatchmethod
    def add(self, event: Event) -> None:
        """Add an event. Those of other kinds change nothing."""

    @add.register
    def _(self, event: SupervisorStarted) -> None:
        self._prepared = self._prepared or event.time
        # Whoever starts a failed trial again wants another try.
        if self._condition != "new":
            self._condition = "paused"

    @add.register
    def _(self, event: AttemptStarted) -> None:
        self._attempt, self._resumed = event.attempt, event.resumed_from_step or 0
        self._reported = self._saved = self._resumed
        self._began = self._latest = event.time
        self._since = time.monotonic() - max(0.0, time.time() - event.time)
        self._condition = "paused"
        # After a fallback to an earlier checkpoint, training may take another course.
        self._validations = {
            step: item for step, item in self._validations.items() if step <= self._resumed
        }

    @add.register
    def _(self, event: LatencyMeasured) -> None:
        self._latency_ms = event.milliseconds

    @add.register
    def _(self, event: TrainingStep) -> None:
        self._report(event.attempt, event.step, event.time)

    @add.register
    def _(self, event: CheckpointSaved) -> None:
        self._report(event.attempt, event.step, event.time)
        if event.attempt == self._attempt:
            self._saved = event.step

    @add.register
    def _(self, event: Validated) -> None:
        self._report(event.attempt, event.step, event.time)
        if event.attempt == self._attempt:
            self._validations[event.step] = Validation(event.step, dict(event.metrics))

    @add.register
    def _(self, event: AttemptEnded) -> None:
        if self._began:
            self._seconds += max(0.0, event.seconds or event.time - self._began)
        self._began = 0.0
        self._failed = event if event.outcome == "failed" else None
        self._condition = "finished" if event.outcome in SUCCESSES else "paused"

    @add.register
    def _(self, event: DecisionMade) -> None:
        if event.fallback and event.fallback not in self._fallbacks:
            self._fallbacks.append(event.fallback)
        if event.action == "stop" and self._failed is not None:
            self._condition = "failed"
            self._failure, self._error = self._failed.failure_class, self._failed.message

    @add.register
    def _(self, event: StepFailed) -> None:
        """The trial ended before an attempt, or without one."""
        self._condition, self._error = "failed", event.message
        reported = RankError(
            rank=0, time=event.time, kind=event.error, message=event.message, traceback="", step=0
        )
        self._failure = str(classify([reported], {}, {}).failure_class)

    def _report(self, attempt: int, step: int, when: float) -> None:
        if attempt == self._attempt:
            self._reported, self._latest = max(self._reported, step), max(self._latest, when)


def read_curve(events: Path) -> Curve:
    """Return what the events in a folder say about a trial."""
    curve = Curve()
    for event in read_events(events):
        curve.add(event)
    return curve
