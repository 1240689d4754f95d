"""What a collector lacks, in OpenTelemetry's form: a run's spans, and its metrics over time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from opentelemetry.sdk.metrics import export
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import SpanContext, Status, StatusCode, TraceFlags

from steadytrain.components.observe.metrics import COMMON_LABELS, METRICS, Metric, Samples
from steadytrain.components.observe.otlp.collector import Collector
from steadytrain.components.observe.otlp.spans import RunSpans, Span, left_out
from steadytrain.components.observe.run_metrics import RunMetrics
from steadytrain.components.shared.events import Cursor, Event
from steadytrain.components.shared.events.types import AttemptEnded, AttemptStarted, DecisionMade
from steadytrain.components.shared.tracking.notes import Trace


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


EVERY_SECONDS: Final = 10.0


class Snapshot(NamedTuple):
    """The metrics at a moment, in seconds since the epoch, and when the run began."""

    time: float
    began: float
    samples: Samples


class SnapshotReader:
    """Takes a snapshot each EVERY_SECONDS of the run's time, and after each attempt.

    So a collector that was away gets the points of that time too, at their own times. Counters
    count from the beginning of the run, whichever process reads.

    Args:
        folder: of the event files.
        sent: offset in each file up to which the collector has everything.
        complete: adds what only the present knows to a snapshot of the present.
    """

    def __init__(
        self, folder: Path, sent: Mapping[str, int], complete: Callable[[Samples], None]
    ) -> None:
        self.cursor, self.sent, self.complete = Cursor(folder), sent, complete
        self._metrics = RunMetrics()
        self._newest = 0.0

    def new(self) -> Iterator[Snapshot]:
        """Yield the snapshots since the last call, and one of the present if it is due."""
        for item in self.cursor.read():
            self._metrics.add(item.event)
            decisive = isinstance(item.event, AttemptEnded | DecisionMade)
            if self._has_begun and (decisive or self._is_due(item.event.time)):
                self._newest = max(self._newest, item.event.time)
                if item.offset > self.sent.get(item.file, 0):
                    yield self._snapshot()
            self.cursor.ack()
        if self._has_begun and self._is_due(time.time()):
            # Without a point for minutes, a database takes a series for gone.
            self._newest = time.time()
            present = self._snapshot()
            self.complete(present.samples)
            yield present

    @property
    def _has_begun(self) -> bool:
        return bool(self._metrics.history.attempts)

    def _is_due(self, moment: float) -> bool:
        return moment - self._newest >= EVERY_SECONDS

    def _snapshot(self) -> Snapshot:
        began = self._metrics.history.attempts[0].started.time
        return Snapshot(self._newest, began, self._metrics.current())


Points = list[export.NumberDataPoint]


def send_snapshots(collector: Collector, snapshots: Sequence[Snapshot]) -> None:
    """Send a run's metrics.

    Raises:
        TrackingError: the collector does not accept them.
    """
    values = (collector.config.run_id, collector.config.model_name)
    common = dict(zip(COMMON_LABELS, values, strict=True))
    metrics = [
        # No unit: databases would append it to the name.
        export.Metric(metric.name, f"{metric.help} Unit: {metric.unit or 'none'}.", "", data)
        for metric in METRICS.values()
        if (data := _data(metric, snapshots, common)).data_points
    ]
    scope = export.ScopeMetrics(collector.scope, metrics, "")
    of_run = export.ResourceMetrics(collector.resource, [scope], "")
    collector.send_metrics(export.MetricsData([of_run]))


def _data(
    metric: Metric, snapshots: Sequence[Snapshot], common: Mapping[str, str]
) -> export.Sum | export.Gauge | export.Histogram:
    total = export.AggregationTemporality.CUMULATIVE
    if metric.kind == "histogram":
        return export.Histogram(list(_distributions(metric, snapshots, common)), total)
    points = list(_numbers(metric, snapshots, common))
    return export.Sum(points, total, True) if metric.kind == "counter" else export.Gauge(points)


def _numbers(
    metric: Metric, snapshots: Sequence[Snapshot], common: Mapping[str, str]
) -> Iterator[export.NumberDataPoint]:
    for moment, began, samples in snapshots:
        for (name, label), value in samples.values.items():
            if name == metric.name:
                own = {metric.label: label} if metric.label else {}
                start, end = _rounded_nanoseconds(began), _rounded_nanoseconds(moment)
                yield export.NumberDataPoint({**common, **own}, start, end, float(value))


def _distributions(
    metric: Metric, snapshots: Sequence[Snapshot], common: Mapping[str, str]
) -> Iterator[export.HistogramDataPoint]:
    for moment, began, samples in snapshots:
        if found := samples.distributions.get(metric.name):
            yield export.HistogramDataPoint(
                attributes=dict(common),
                start_time_unix_nano=_rounded_nanoseconds(began),
                time_unix_nano=_rounded_nanoseconds(moment),
                count=sum(found.counts),
                sum=found.sum,
                bucket_counts=found.counts,
                explicit_bounds=found.bounds,
                # Unknown. The message leaves them out then.
                min=None,  # type: ignore[arg-type]
                max=None,  # type: ignore[arg-type]
            )


def _rounded_nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)
