"""Spans in OpenTelemetry's form."""

from __future__ import annotations

from collections.abc import Sequence

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import SpanContext, Status, StatusCode, TraceFlags

from steadytrain.components.observe.otlp.collector import Collector
from steadytrain.components.observe.otlp.spans import Span
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
