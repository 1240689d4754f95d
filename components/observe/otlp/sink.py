"""OpenTelemetry as a sink of the event stream: traces and metrics, by OTLP over HTTP."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import cached_property, partial
from typing import Final

from steadytrain.components.observe.live import add_present
from steadytrain.components.observe.otlp.collector import Collector
from steadytrain.components.observe.otlp.outbox import Outbox
from steadytrain.components.observe.otlp.snapshots import Snapshot, SnapshotReader
from steadytrain.components.observe.otlp.spans import Span
from steadytrain.components.observe.otlp.traces import SpanReader
from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.tracking.parallel import check_package
from steadytrain.components.shared.tracking.pull import BATCH_SECONDS, CLOSE_SECONDS, PullSink
from steadytrain.components.shared.tracking.spool import numbers_in
from steadytrain.components.shared.tracking.trace import Trace
from steadytrain.components.shared.workspace import Workspace

NAME: Final = "otlp"

_BATCH_SPANS, _BATCH_SNAPSHOTS = 512, 32
_SPANS, _METRICS = "otlp/spans", "otlp/metrics"
"""Notes with what has been sent."""


class OtlpDelivery:
    """Sends a run's spans and metrics to its collector. It is used again after an error."""

    def __init__(self, config: RunConfig, workspace: Workspace) -> None:
        self.config, self.workspace = config, workspace

    def catch_up(self, *, give_up: Callable[[], bool] = lambda: False) -> None:
        """Send what the collector lacks. If it rejects the spans, it gets the metrics all the same.

        Raises:
            TrackingError: the collector does not accept something.
            StorageError: the run's folder cannot be written.
        """
        with ExitStack() as both:
            both.callback(partial(self._metrics.catch_up, give_up=give_up))
            self._spans.catch_up(give_up=give_up)

    @cached_property
    def _collector(self) -> Collector:
        return Collector(self.config)

    @cached_property
    def _spans(self) -> Outbox[Span]:
        from steadytrain.components.observe.otlp.traces import send_spans

        trace = Trace.of(self.workspace, self.config.observability.traceparent)
        reader = SpanReader(self.workspace.events, trace, numbers_in(self.workspace, _SPANS))
        send = partial(send_spans, self._collector, trace)
        return Outbox(self.workspace, _SPANS, reader, _BATCH_SPANS, send)

    @cached_property
    def _metrics(self) -> Outbox[Snapshot]:
        from steadytrain.components.observe.otlp.snapshots import send_snapshots

        reader = SnapshotReader(
            self.workspace.events,
            numbers_in(self.workspace, _METRICS),
            partial(add_present, config=self.config, workspace=self.workspace),
        )
        send = partial(send_snapshots, self._collector)
        return Outbox(self.workspace, _METRICS, reader, _BATCH_SNAPSHOTS, send)


class OtlpSink(PullSink):
    """Sends traces and metrics to a collector, including those that an earlier sink could not send.

    Args:
        config: the run's configuration.
        workspace: the run's workspace.
        batch_seconds, close_seconds: as for `PullSink`.

    Raises:
        BadInput: OpenTelemetry is not installed.
    """

    def __init__(
        self,
        config: RunConfig,
        workspace: Workspace,
        *,
        batch_seconds: float = BATCH_SECONDS,
        close_seconds: float = CLOSE_SECONDS,
    ) -> None:
        check_package(NAME)
        delivery = OtlpDelivery(config, workspace)
        super().__init__(
            "OpenTelemetry",
            workspace,
            lambda: delivery,
            batch_seconds=batch_seconds,
            close_seconds=close_seconds,
        )
