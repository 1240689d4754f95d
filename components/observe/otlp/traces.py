"""The spans that a collector lacks, from the event files, in the form of OpenTelemetry."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import SpanContext, Status, StatusCode, TraceFlags

from steadytrain.components.observe.otlp.collector import Collector
from steadytrain.components.observe.otlp.spans import RunSpans, Span, left_out
from steadytrain.components.shared.events import Cursor, Event
from steadytrain.components.shared.events.types import AttemptEnded, AttemptStarted
from steadytrain.components.shared.tracking.trace import Trace


def send_spans(collector: Collector, trace: Trace, spans: Sequence[Span]) -> None:
    """Send spans of a run.

    Raises:
        TrackingError: the collector does not accept them.
    """
    collector.send_spans([_readable(span, collector, trace) for span in spans])


def _readable(span: Span, collector: Collector, trace: Trace) -> ReadableSpan:
    return ReadableSpan(
        span.name,
        context=_context(trace, span.id),
        parent=_context(trace, span.parent) if span.parent else None,
        resource=collector.resource,
        attributes=dict(span.attributes),
        status=Status(StatusCode.ERROR, span.error) if span.error else Status(),
        start_time=_nanoseconds(span.start),
        end_time=_nanoseconds(span.end),
        instrumentation_scope=collector.scope,
    )


def _context(trace: Trace, span_id: str) -> SpanContext:
    sampled = TraceFlags(TraceFlags.SAMPLED)
    return SpanContext(
        int(trace.trace_id, 16), int(span_id, 16), is_remote=False, trace_flags=sampled
    )


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)


class SpanReader:
    """Reads the spans of a run, each once, as they become complete.

    The event files are the queue. It reads them from their beginning, because a span may have begun
    before another process sent the last one.

    Args:
        folder: of the event files.
        sent: offset in each file up to which the collector has everything.
    """

    def __init__(self, folder: Path, trace: Trace, sent: Mapping[str, int]) -> None:
        self.folder, self.trace, self.sent = folder, trace, sent
        self.cursor = Cursor(folder)
        self._spans = RunSpans(trace)
        self._began: dict[int, dict[str, int]] = {}

    def new(self) -> Iterator[Span]:
        """Yield the spans that are complete by now, except those that an earlier call yielded."""
        for item in self.cursor.read():
            is_sent = item.offset <= self.sent.get(item.file, 0)
            for span in self._of(item.event, steps=not is_sent):
                if not is_sent:
                    yield span
            self.cursor.ack()

    def _of(self, event: Event, *, steps: bool) -> Iterator[Span]:
        """Yield the spans that are complete with an event; after a failure, those of all steps."""
        yield from self._spans.add(event)
        if isinstance(event, AttemptStarted):
            self._began[event.attempt] = self.cursor.place
        elif isinstance(event, AttemptEnded):
            began = self._began.pop(event.attempt, {})
            if event.failure_class and steps:
                events = (item.event for item in Cursor(self.folder, began).read())
                yield from left_out(self.trace, event.attempt, events)
