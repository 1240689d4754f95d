"""Snapshots of metrics in OpenTelemetry's form: the names and labels that Prometheus sees."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from opentelemetry.sdk.metrics import export

from steadytrain.components.observe.otlp.collector import Collector
from steadytrain.components.observe.otlp.snapshots import Snapshot
from steadytrain.components.observe.registry import COMMON_LABELS, METRICS, Metric

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
    for time, began, samples in snapshots:
        for (name, label), value in samples.values.items():
            if name == metric.name:
                own = {metric.label: label} if metric.label else {}
                start, end = _nanoseconds(began), _nanoseconds(time)
                yield export.NumberDataPoint({**common, **own}, start, end, float(value))


def _distributions(
    metric: Metric, snapshots: Sequence[Snapshot], common: Mapping[str, str]
) -> Iterator[export.HistogramDataPoint]:
    for time, began, samples in snapshots:
        if found := samples.distributions.get(metric.name):
            yield export.HistogramDataPoint(
                attributes=dict(common),
                start_time_unix_nano=_nanoseconds(began),
                time_unix_nano=_nanoseconds(time),
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
