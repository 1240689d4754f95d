"""What a collector lacks, in OpenTelemetry's form: a run's spans, and its metrics over time."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from opentelemetry.sdk.metrics import export
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import SpanContext, Status, StatusCode, TraceFlags

from steadytrain.components.observe.metrics import COMMON_LABELS, METRICS, Metric, Samples
from steadytrain.components.observe.otlp.spans import RunSpans, Span, left_out
from steadytrain.components.observe.run_metrics import RunMetrics
from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.errors import TrackingError
from steadytrain.components.shared.events import Cursor, Event
from steadytrain.components.shared.events.types import AttemptEnded, AttemptStarted, DecisionMade
from steadytrain.components.shared.tracking.connect import shown
from steadytrain.components.shared.tracking.notes import Trace

if TYPE_CHECKING:
    from collections.abc import Sequence

    from opentelemetry.sdk.metrics.export import MetricsData
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope


ENDPOINT: Final = "OTEL_EXPORTER_OTLP_ENDPOINT"
TIMEOUT_SECONDS: Final = 5.0
"""Longest wait for an answer, with the exporter's own retries."""
LONGEST_SECONDS: Final = 2 * TIMEOUT_SECONDS
"""Longest time for all of it, also if the answer comes byte by byte."""
_KEEP: Final = frozenset({401, 403, 404, 429, 502, 503, 504})
"""Statuses after which a batch is sent again: those that OTLP says may be retried, and those that
come from a wrong address or login, which no batch would pass."""

_DEFAULT: Final = "http://localhost:4318"
_SERVICE: Final = "steadytrain"


class Rejected(TrackingError):
    """The collector will never accept a batch."""


class Collector:
    """Sends to the collector of a configuration.

    The exporters read the other variables of OpenTelemetry themselves: headers, certificates,
    compression.

    Raises:
        Rejected: from each method, if the collector will never accept it.
        TrackingError: from each method, if the collector does not accept it now.
    """

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self._status = 0
        # It would print each refusal; the sink reports the first one.
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)

    @property
    def address(self) -> str:
        """The collector's address, without credentials."""
        stated = self.config.observability.otlp_endpoint or os.environ.get(ENDPOINT)
        return shown(stated or _DEFAULT)

    def send_spans(self, spans: Sequence[ReadableSpan]) -> None:
        """Send spans and wait for the answer."""
        self._send(self._span_exporter, spans, f"{len(spans)} spans")

    def send_metrics(self, metrics: MetricsData) -> None:
        """Send metrics and wait for the answer."""
        self._send(self._metric_exporter, metrics, "metrics")

    @cached_property
    def resource(self) -> Resource:
        """What every span and metric is about."""
        from opentelemetry.sdk.resources import Resource

        names = {"run": self.config.run_id, "model": self.config.model_name}
        return Resource.create(
            {"service.name": _SERVICE} | {f"steadytrain.{key}": name for key, name in names.items()}
        )

    @cached_property
    def scope(self) -> InstrumentationScope:
        """Who measured."""
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope

        return InstrumentationScope(_SERVICE)

    @cached_property
    def _span_exporter(self) -> Any:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        address, session = self._endpoint("traces"), self._session()
        return OTLPSpanExporter(address, timeout=TIMEOUT_SECONDS, session=session)

    @cached_property
    def _metric_exporter(self) -> Any:
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter

        address, session = self._endpoint("metrics"), self._session()
        return OTLPMetricExporter(address, timeout=TIMEOUT_SECONDS, session=session)

    def _session(self) -> Any:
        """Return a session that notes the status of each answer, which exporters do not return."""
        from steadytrain.components.shared.http_client import session

        def note(answer: Any, *_: object, **__: object) -> None:
            self._status = answer.status_code

        made = session()
        # Another address may take everything and keep nothing. Some exporters follow redirects.
        made.max_redirects = 0
        made.hooks["response"].append(note)
        return made

    def _endpoint(self, signal: str) -> str | None:
        """Return the address for a signal; None leaves it to OpenTelemetry's variables."""
        stated = self.config.observability.otlp_endpoint
        return f"{stated.rstrip('/')}/v1/{signal}" if stated else None

    def _send(self, exporter: Any, items: object, what: str) -> None:
        from steadytrain.components.shared.http_client import deadline

        self._status = 0
        with deadline(LONGEST_SECONDS):
            done = exporter.export(items).name == "SUCCESS"
        if done and 200 <= self._status < 300:
            return
        if 300 <= self._status < 400:
            raise TrackingError(
                f"the OpenTelemetry collector {self.address} redirects what it is sent to another "
                f"address (HTTP {self._status})",
                remedy=f"give the address that accepts it (observability.otlp_endpoint or "
                f"{ENDPOINT})",
            )
        if self._status >= 400 and self._status not in _KEEP:
            raise Rejected(
                f"the OpenTelemetry collector {self.address} rejects {what} for good (HTTP "
                f"{self._status}); such batches are dropped",
                remedy="the collector's log has the reason",
            )
        raise TrackingError(
            f"the OpenTelemetry collector {self.address} does not accept what it is sent",
            remedy=f"start it, or fix its address (observability.otlp_endpoint or {ENDPOINT})",
        )


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
            self._began[event.attempt] = self.cursor.position
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
                labels = {metric.label: label} if metric.label else {}
                start, end = _rounded_nanoseconds(began), _rounded_nanoseconds(moment)
                yield export.NumberDataPoint({**common, **labels}, start, end, float(value))


def _distributions(
    metric: Metric, snapshots: Sequence[Snapshot], common: Mapping[str, str]
) -> Iterator[export.HistogramDataPoint]:
    for moment, began, samples in snapshots:
        if distribution := samples.distributions.get(metric.name):
            yield export.HistogramDataPoint(
                attributes=dict(common),
                start_time_unix_nano=_rounded_nanoseconds(began),
                time_unix_nano=_rounded_nanoseconds(moment),
                count=sum(distribution.counts),
                sum=distribution.sum,
                bucket_counts=distribution.counts,
                explicit_bounds=distribution.bounds,
                # Unknown. The message leaves them out then.
                min=None,  # type: ignore[arg-type]
                max=None,  # type: ignore[arg-type]
            )


def _rounded_nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)
