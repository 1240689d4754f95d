"""OpenTelemetry as a sink of the event stream: traces and metrics, by OTLP over HTTP."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import cached_property, partial
from itertools import islice
from typing import Final, Generic, Protocol, TypeVar, Unpack

from steadytrain.components.observe.otlp.exports import (
    Collector,
    Rejected,
    Snapshot,
    SnapshotReader,
    SpanReader,
)
from steadytrain.components.observe.otlp.spans import Span
from steadytrain.components.observe.run_metrics import add_present
from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.events import Cursor
from steadytrain.components.shared.tracking.notes import (
    Trace,
    exclusive,
    numbers_in,
    remember,
    warn,
)
from steadytrain.components.shared.tracking.pull_sink import PullSink, SinkTiming, check_package
from steadytrain.components.shared.workspace import Workspace

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Source(Protocol[T_co]):
    """Reads a run's event files.

    cursor: everything up to its place has been yielded by `new`.
    """

    cursor: Cursor

    def new(self) -> Iterator[T_co]:
        """Yield what has been added. It is exhausted before the next call."""


class Outbox(Generic[T]):
    """Sends what a source yields, in batches.

    The event files are the queue. A batch that is not accepted stays here, and nothing is read
    until it is; one that is rejected for good is dropped with a warning, which comes once. A batch
    is sent twice only if this process died before it noted the answer.

    Args:
        note: name of the note with the offsets of what has been sent.
        size: most items in memory.
        send: raises TrackingError if a batch is not accepted, Rejected if it never will be.
    """

    def __init__(
        self,
        workspace: Workspace,
        note: str,
        source: Source[T],
        size: int,
        send: Callable[[Sequence[T]], None],
    ) -> None:
        self.workspace, self.note, self.source = workspace, note, source
        self.size, self.send = size, send
        self._items: Iterator[T] = iter(())
        self._batch: list[T] = []
        self._warned = False

    def catch_up(self, *, give_up: Callable[[], bool] = lambda: False) -> None:
        """Send what is there. Stop if `give_up` returns true before a batch.

        Raises:
            TrackingError: a batch was not accepted, or another process of the run is sending.
            StorageError: the note cannot be written.
        """
        self._send_all(give_up)
        if not give_up():
            self._items = self.source.new()
            self._send_all(give_up)

    def _send_all(self, give_up: Callable[[], bool]) -> None:
        while not give_up():
            self._batch = self._batch or list(islice(self._items, self.size))
            if not self._batch:
                break
            with exclusive(self.workspace, "exporting"):
                try:
                    self.send(self._batch)
                except Rejected as error:
                    self._warn(error)
                self._batch = []
                remember(self.workspace, self.note, json.dumps(self.source.cursor.position))

    def _warn(self, error: Rejected) -> None:
        if not self._warned:
            self._warned = True
            warn(self.workspace, f"{error.message}; {error.remedy}")


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
        from steadytrain.components.observe.otlp.exports import send_spans

        trace = Trace.of(self.workspace, self.config.observability.traceparent)
        reader = SpanReader(self.workspace.events, trace, numbers_in(self.workspace, _SPANS))
        send = partial(send_spans, self._collector, trace)
        return Outbox(self.workspace, _SPANS, reader, _BATCH_SPANS, send)

    @cached_property
    def _metrics(self) -> Outbox[Snapshot]:
        from steadytrain.components.observe.otlp.exports import send_snapshots

        reader = SnapshotReader(
            self.workspace.events,
            numbers_in(self.workspace, _METRICS),
            partial(add_present, config=self.config, workspace=self.workspace),
        )
        send = partial(send_snapshots, self._collector)
        return Outbox(self.workspace, _METRICS, reader, _BATCH_SNAPSHOTS, send)


class OtlpSink(PullSink):
    """Sends traces and metrics to a collector, including those that an earlier sink could not send.

    Raises:
        BadInput: OpenTelemetry is not installed.
    """

    def __init__(
        self, config: RunConfig, workspace: Workspace, **timing: Unpack[SinkTiming]
    ) -> None:
        check_package(NAME)
        delivery = OtlpDelivery(config, workspace)
        super().__init__("OpenTelemetry", workspace, lambda: delivery, **timing)
