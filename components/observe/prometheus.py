"""Prometheus as a sink of the event stream: an endpoint with the run's metrics.

A thread reads the run's events from its files, as MLflow's sink does. So it can neither slow down
nor stop training, and the next supervisor serves the same counters again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from steadytrain.components.observe.background import CLOSE_SECONDS, Background
from steadytrain.components.observe.endpoint import Endpoint, default_host
from steadytrain.components.observe.live import LiveMetrics
from steadytrain.components.observe.registry import COMMON_LABELS, METRICS, Metric
from steadytrain.components.observe.samples import Distribution, Samples
from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.workspace import Workspace


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


POLL_SECONDS = 1.0


class PrometheusSink(Background):
    """Serves a run's metrics until it is closed, and then until Prometheus has the final ones.

    `close` waits for the last scrape, at most `observability.prometheus_linger_seconds`. A run that
    was stopped or preempted waits for nothing: whoever continues it serves the same metrics.

    Args:
        config: the run's configuration, with a port.
        workspace: the run's workspace.
        poll_seconds: how often to look for new events, and for a port that was in use.
    """

    def __init__(
        self, config: RunConfig, workspace: Workspace, *, poll_seconds: float = POLL_SECONDS
    ) -> None:
        self.config = config
        self._metrics: LiveMetrics | None = None
        self._endpoint: Endpoint | None = None
        self._was_busy = False
        self._linger = config.observability.prometheus_linger_seconds
        super().__init__(
            "prometheus",
            workspace,
            every=poll_seconds,
            close_seconds=self._linger + CLOSE_SECONDS,
        )

    def work(self) -> None:
        """Read the new events, and serve."""
        metrics = self._read()
        # Not before: an endpoint without all events would serve counters that are too low.
        self._open(metrics)

    def finish(self) -> None:
        """Wait until Prometheus has the final values, if nobody will serve them again."""
        metrics = self._read()
        self._open(metrics)
        if self._endpoint is not None and metrics.has_ended:
            self._endpoint.wait_for_scrape(self._linger)

    @contextlib.contextmanager
    def guarded(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.warn(f"no metrics: {error}; training continues")
        finally:
            if self._endpoint is not None:
                self._endpoint.close()

    def _read(self) -> LiveMetrics:
        if self._metrics is None:
            self._metrics = LiveMetrics(self.config, self.workspace)
        self._metrics.read()
        return self._metrics

    def _open(self, metrics: LiveMetrics) -> None:
        """Start to serve, unless the port is in use; then try again later."""
        watching = self.config.observability
        port, host = watching.prometheus_port, watching.prometheus_host
        if self._endpoint is not None or port is None:
            return
        labels = (self.workspace.run_id, self.config.model_name)
        common = dict(zip(COMMON_LABELS, labels, strict=True))
        try:
            collector = RunCollector(common, metrics.samples)
            self._endpoint = Endpoint(port, collector, default_host() if host is None else host)
        except OSError as error:
            if not self._was_busy:
                self._was_busy = True
                where = "" if host is None else f", prometheus_host {host!r}"
                self.warn(
                    f"no metrics on observability.prometheus_port {port}{where}: "
                    f"{error.strerror}; "
                    "training continues, and the port is tried again"
                )
