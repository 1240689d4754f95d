"""Metrics in the form that prometheus_client writes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import accumulate

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from steadytrain.components.observe.registry import METRICS, Metric
from steadytrain.components.observe.samples import Distribution, Samples


class RunCollector(Collector):
    """Collects one run's metrics.

    Args:
        common: values of the labels that every series has.
        read: returns the current values. It is called for each scrape, from any thread.
    """

    def __init__(self, common: Mapping[str, str], read: Callable[[], Samples]) -> None:
        self.common, self.read = list(common.values()), read

    def collect(self) -> Iterable[Family]:
        samples = self.read()
        for metric in METRICS.values():
            if metric.kind == "histogram":
                found = samples.distributions.get(metric.name)
                if found is not None:
                    yield self._histogram(metric, found)
            elif values := _values(samples, metric):
                kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
                family = kind(metric.name, metric.help, labels=metric.labels)
                for label, value in values.items():
                    family.add_metric([*self.common, *([label] if label else [])], value)
                yield family

    def _histogram(self, metric: Metric, found: Distribution) -> Family:
        family = HistogramMetricFamily(metric.name, metric.help, labels=metric.labels)
        bounds = [*map(str, map(float, found.bounds)), "+Inf"]
        counts = accumulate(map(float, found.counts))
        family.add_metric(self.common, list(zip(bounds, counts, strict=True)), found.sum)
        return family


def _values(samples: Samples, metric: Metric) -> dict[str, float]:
    return {label: value for (name, label), value in samples.values.items() if name == metric.name}
