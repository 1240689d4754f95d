"""Prometheus as a sink of the event stream: an endpoint with the run's metrics.

A thread reads the run's events from its files, as MLflow's sink does. So it can neither slow down
nor stop training, and the next supervisor serves the same counters again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from steadytrain.components.observe.background import CLOSE_SECONDS, Background
from steadytrain.components.observe.collector import RunCollector
from steadytrain.components.observe.endpoint import Endpoint, default_host
from steadytrain.components.observe.live import LiveMetrics
from steadytrain.components.observe.registry import COMMON_LABELS
from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.workspace import Workspace

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
