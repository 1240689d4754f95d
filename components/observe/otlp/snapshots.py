"""A run's metrics at a moment, again and again, from the run's event files."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from opentelemetry.sdk.metrics import export

from steadytrain.components.observe.otlp.collector import Collector
from steadytrain.components.observe.registry import COMMON_LABELS, METRICS, Metric
from steadytrain.components.observe.run_metrics import RunMetrics
from steadytrain.components.observe.samples import Samples
from steadytrain.components.shared.events import Cursor
from steadytrain.components.shared.events.types import AttemptEnded, DecisionMade

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
                start, end = _nanoseconds(began), _nanoseconds(moment)
                yield export.NumberDataPoint({**common, **own}, start, end, float(value))


def _distributions(
    metric: Metric, snapshots: Sequence[Snapshot], common: Mapping[str, str]
) -> Iterator[export.HistogramDataPoint]:
    for moment, began, samples in snapshots:
        if found := samples.distributions.get(metric.name):
            yield export.HistogramDataPoint(
                attributes=dict(common),
                start_time_unix_nano=_nanoseconds(began),
                time_unix_nano=_nanoseconds(moment),
                count=sum(found.counts),
                sum=found.sum,
                bucket_counts=found.counts,
                explicit_bounds=found.bounds,
                # Unknown. The message leaves them out then.
                min=None,  # type: ignore[arg-type]
                max=None,  # type: ignore[arg-type]
            )


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)
