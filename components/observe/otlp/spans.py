"""A run's spans, computed from its events alone.

Nothing is stored: whoever reads the same events builds the same spans with the same ids.

    pipeline run
      step                    one for each step of the pipeline
        attempt               below the train step
          queueing, admission, image pull
          rendezvous, set-up, first step
          steps               the steps since the last report: one report of ten
          validation, checkpoint
        recovery decision
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import singledispatchmethod
from types import MappingProxyType
from typing import Final

from steadytrain.components.shared.config.secrets import redact
from steadytrain.components.shared.events import Event
from steadytrain.components.shared.events.types import (
    AttemptEnded,
    AttemptStarted,
    CheckpointSaved,
    DecisionMade,
    PodWaited,
    StepFailed,
    StepFinished,
    StepStarted,
    TrainingStarted,
    TrainingStep,
    Validated,
)
from steadytrain.components.shared.tracking.notes import Trace, attempt_span

Value = str | int | float | bool

SAMPLED_STEPS: Final = 0.1
"""Share of the reports of steps that have a span, in attempts that do not fail."""

_FIRST, _TRAIN, _LAST = "begin", "train", "report"
"""Steps of the pipeline."""
_LOST = "interrupted"


@dataclass(frozen=True)
class Span:
    """A part of a run, in seconds since the epoch.

    id: 16 hexadecimal digits.
    parent: id of the span that it is a part of; "" if there is none.
    error: why it failed; "" if it did not.
    """

    name: str
    id: str
    parent: str
    start: float
    end: float
    attributes: Mapping[str, Value] = field(default_factory=dict)
    error: str = ""


@dataclass
class _Open:
    """A span that has not ended."""

    id: str
    parent: str
    start: float
    attributes: dict[str, Value] = field(default_factory=dict)

    def end(
        self,
        name: str,
        time: float,
        error: str = "",
        about: Mapping[str, Value] = MappingProxyType({}),
    ) -> Span:
        end = max(self.start, time)
        attributes = {**self.attributes, **about}
        return Span(name, self.id, self.parent, self.start, end, attributes, error)


class Steps:
    """The spans of one attempt's steps: one for each report, however many steps it is about."""

    def __init__(self, trace: Trace, attempt: int) -> None:
        self.trace, self.attempt = trace, attempt
        self._reported: tuple[float, int, int] | None = None
        self._is_first = True

    def start(self, event: TrainingStarted) -> None:
        self._reported = (event.time, event.step, 0)

    def report(self, event: TrainingStep) -> tuple[Span, bool] | None:
        """Return the report's span, and whether it is recorded whatever happens to the attempt.

        None for a report without a beginning.
        """
        if self._reported is None:
            return None
        since, step, tokens = self._reported
        self._reported = (event.time, event.step, event.tokens)
        name, first = ("first step", True) if self._is_first else ("steps", False)
        self._is_first = False
        if not first and event.tokens_per_second > 0:
            # Validations and checkpoints since the last report are spans of their own.
            since = max(since, event.time - (event.tokens - tokens) / event.tokens_per_second)
        span = Span(
            name,
            self.trace.span_id("steps", self.attempt, event.step),
            attempt_span(self.trace, self.attempt),
            min(since, event.time),
            event.time,
            {
                "steadytrain.step": event.step,
                "steadytrain.steps": event.step - step,
                "steadytrain.loss": event.loss,
                "steadytrain.learning_rate": event.learning_rate,
                "steadytrain.tokens_per_second": event.tokens_per_second,
                "steadytrain.data_wait": event.data_wait,
            },
        )
        return span, first or self._is_sampled(span)

    def _is_sampled(self, span: Span) -> bool:
        """Decide by the id, so that everyone decides alike."""
        return self.trace.sampled and int(span.id, 16) < SAMPLED_STEPS * 16 ** len(span.id)


def left_out(trace: Trace, attempt: int, events: Iterable[Event]) -> Iterator[Span]:
    """Yield the spans of an attempt's steps that `RunSpans` leaves out.

    Args:
        events: the attempt's, and any others.
    """
    steps = Steps(trace, attempt)
    for event in events:
        if getattr(event, "attempt", None) != attempt:
            continue
        if isinstance(event, TrainingStarted):
            steps.start(event)
        elif isinstance(event, TrainingStep) and (reported := steps.report(event)):
            span, is_recorded = reported
            if not is_recorded:
                yield span


class RunSpans:
    """Turns events into spans. A span is complete with one event, always the same one."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self._root = trace.span_id("run")
        self._executions = 0
        self._execution: _Open | None = None
        self._counts: dict[str, int] = {}
        self._steps: dict[str, _Open] = {}
        self._attempts: dict[int, _Open] = {}
        self._reports: dict[int, Steps] = {}
        self._ended: dict[int, tuple[str, float]] = {}
        self._latest = 0.0

    def add(self, event: Event) -> Iterator[Span]:
        """Yield the spans that are complete with an event."""
        yield from self._add(event)
        self._latest = max(self._latest, event.time)

    @singledispatchmethod
    def _add(self, event: Event) -> Iterator[Span]:  # noqa: ARG002  only for its type
        """Yield nothing for an event that no span is made from."""
        yield from ()

    @_add.register
    def _(self, event: StepStarted) -> Iterator[Span]:
        if event.stage == _FIRST:
            yield from self._end_execution(self._latest, _LOST)
        if event.stage in self._steps:
            yield self._steps.pop(event.stage).end(f"step {event.stage}", self._latest, _LOST)
        if self._execution is None and event.stage != _LAST:
            self._begin_execution(event.time)
        number = self._counts[event.stage] = self._counts.get(event.stage, 0) + 1
        self._steps[event.stage] = _Open(
            self.trace.span_id("step", event.stage, number),
            self._execution.id if self._execution else self._root,
            event.time,
        )

    @_add.register
    def _(self, event: StepFinished) -> Iterator[Span]:
        yield from self._end_step(event, "", {"steadytrain.reused": event.reused})

    @_add.register
    def _(self, event: StepFailed) -> Iterator[Span]:
        yield from self._end_step(event, event.message, {"error.type": event.error})

    @_add.register
    def _(self, event: AttemptStarted) -> Iterator[Span]:
        step = self._steps.get(_TRAIN)
        self._attempts[event.attempt] = _Open(
            attempt_span(self.trace, event.attempt),
            step.id if step else self._root,
            event.time,
            {
                "steadytrain.attempt": event.attempt,
                "steadytrain.world_size": event.world_size,
                "steadytrain.micro_batch_size": event.batch.micro_batch_size,
                "steadytrain.resumed_from_step": event.resumed_from_step or 0,
            },
        )
        self._reports[event.attempt] = Steps(self.trace, event.attempt)
        yield from ()

    @_add.register
    def _(self, event: PodWaited) -> Iterator[Span]:
        """Yield each wait that began; one that did not end failed when the pod was lost."""
        waits = ("queueing", "admission", "image pull")
        times = (event.created, event.admitted, event.scheduled, event.started)
        for name, start, end in zip(waits, times, times[1:], strict=False):
            if start:
                part = self._part(event.attempt, name, event.node, start)
                error = "" if end else _LOST
                node = {"steadytrain.node": event.node}
                yield part.end(name, end or event.time, error, node)

    @_add.register
    def _(self, event: TrainingStarted) -> Iterator[Span]:
        attempt = self._attempts.get(event.attempt)
        if attempt is None:
            return
        self._reports[event.attempt].start(event)
        if event.joined:
            joined = min(event.joined, event.time)
            start = min(attempt.start, joined)
            yield self._part(event.attempt, "rendezvous", 0, start).end("rendezvous", joined)
            yield self._part(event.attempt, "set-up", 0, joined).end("set-up", event.time)

    @_add.register
    def _(self, event: TrainingStep) -> Iterator[Span]:
        steps = self._reports.get(event.attempt)
        reported = steps.report(event) if steps else None
        if reported is not None:
            span, is_recorded = reported
            if is_recorded:
                yield span

    @_add.register
    def _(self, event: Validated) -> Iterator[Span]:
        about: dict[str, Value] = {"steadytrain.step": event.step, "steadytrain.best": event.best}
        about |= {f"steadytrain.{name}": score for name, score in event.metrics.items()}
        yield from self._timed(event, "validation", event.seconds, about)

    @_add.register
    def _(self, event: CheckpointSaved) -> Iterator[Span]:
        seconds = event.seconds + event.writing_seconds - event.waited_seconds
        about: dict[str, Value] = {
            "steadytrain.step": event.step,
            "steadytrain.bytes": event.bytes,
            "steadytrain.blocking_seconds": event.seconds,
        }
        yield from self._timed(event, "checkpoint", seconds, about)

    @_add.register
    def _(self, event: AttemptEnded) -> Iterator[Span]:
        attempt = self._attempts.pop(event.attempt, None)
        self._reports.pop(event.attempt, None)
        if attempt is None:
            return
        self._ended[event.attempt] = (attempt.parent, max(attempt.start, event.time))
        about: dict[str, Value] = {
            "steadytrain.outcome": event.outcome,
            "steadytrain.step": event.step,
        }
        error = ""
        if event.failure_class:
            about["error.type"] = event.failure_class
            error = redact(event.message)
        yield attempt.end("attempt", event.time, error or event.failure_class, about)

    @_add.register
    def _(self, event: DecisionMade) -> Iterator[Span]:
        if event.in_place and event.batch:
            size = event.batch.micro_batch_size
            span_id = self.trace.span_id("decision", event.attempt, size)
            decision = _Open(span_id, attempt_span(self.trace, event.attempt), event.time)
        elif event.attempt in self._ended:
            parent, ended = self._ended.pop(event.attempt)
            decision = _Open(self.trace.span_id("decision", event.attempt), parent, ended)
        else:
            return
        about: dict[str, Value] = {
            "steadytrain.attempt": event.attempt,
            "steadytrain.action": event.action,
            "steadytrain.reason": redact(event.reason),
            "steadytrain.delay_seconds": event.delay_seconds,
            "error.type": event.failure_class,
        }
        yield decision.end("recovery decision", event.time, about=about)

    def _begin_execution(self, time: float) -> None:
        """Open the span of the pipeline. A later execution of the run is a part of the first."""
        self._executions += 1
        if self._executions == 1:
            self._execution = _Open(self._root, self.trace.caller, time)
        else:
            again = self.trace.span_id("run", self._executions)
            self._execution = _Open(again, self._root, time)

    def _end_execution(self, time: float, error: str = "") -> Iterator[Span]:
        """End the span of the pipeline, and whatever was lost in it."""
        if self._execution is not None:
            for attempt in self._attempts.values():
                yield attempt.end("attempt", self._latest, _LOST)
            for stage, step in self._steps.items():
                yield step.end(f"step {stage}", self._latest, _LOST)
            self._attempts.clear()
            self._steps.clear()
            yield self._execution.end("pipeline run", time, error)
            self._execution = None

    def _end_step(
        self, event: StepFinished | StepFailed, error: str, about: Mapping[str, Value]
    ) -> Iterator[Span]:
        step = self._steps.pop(event.stage, None)
        if step is not None:
            yield step.end(f"step {event.stage}", event.time, redact(error), about)
        if event.stage == _LAST:
            yield from self._end_execution(event.time)

    def _timed(
        self,
        event: Validated | CheckpointSaved,
        name: str,
        seconds: float,
        about: dict[str, Value],
    ) -> Iterator[Span]:
        start = event.time - max(0.0, seconds)
        part = self._part(event.attempt, name, event.step, start)
        yield part.end(name, event.time, about=about)

    def _part(self, attempt: int, name: str, which: int, start: float) -> _Open:
        """Return a part of an attempt; `which` distinguishes parts of one name."""
        parent = attempt_span(self.trace, attempt)
        return _Open(self.trace.span_id(name, attempt, which), parent, start)
