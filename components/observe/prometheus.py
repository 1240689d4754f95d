"""Prometheus as a sink of the event stream: an endpoint with the run's metrics.

A thread reads the run's events from its files, as MLflow's sink does. So it can neither slow down
nor stop training, and the next supervisor serves the same counters again.
"""

from __future__ import annotations

import threading

from steadytrain.components.observe.collector import RunCollector
from steadytrain.components.observe.endpoint import Endpoint, default_host
from steadytrain.components.observe.present import add_present
from steadytrain.components.observe.registry import COMMON_LABELS
from steadytrain.components.observe.run_metrics import RunMetrics
from steadytrain.components.observe.samples import Samples
from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.config.secrets import redact
from steadytrain.components.shared.events import Event, unread
from steadytrain.components.shared.events.types import Warned
from steadytrain.components.shared.storage import LocalStorage
from steadytrain.components.shared.workspace import Workspace
from steadytrain.components.train.recovery.history import counted
from steadytrain.components.train.recovery.ledger import Ledger

POLL_SECONDS = 1.0
_PARTING_SECONDS = 5.0
"""How long to wait for the thread beyond its last scrape."""


class PrometheusSink:
    """Serves a run's metrics until it is closed, and then until Prometheus has the final ones.

    Args:
        config: the run's configuration, with a port.
        workspace: the run's workspace.
        poll_seconds: how often to look for new events, and for a port that was in use.
    """

    def __init__(
        self, config: RunConfig, workspace: Workspace, *, poll_seconds: float = POLL_SECONDS
    ) -> None:
        self.config, self.workspace, self.poll_seconds = config, workspace, poll_seconds
        self._metrics, self._reading = RunMetrics(), threading.Lock()
        self._offsets: dict[str, int] = {}
        self._endpoint: Endpoint | None = None
        self._closing, self._was_busy = threading.Event(), False
        self._thread = threading.Thread(target=self._work, name="prometheus-sink", daemon=True)
        self._thread.start()

    def emit(self, event: Event) -> None:
        """Do nothing: the thread reads the event from its file."""

    def close(self) -> None:
        """Wait for the last scrape, at most `observability.prometheus_linger_seconds`.

        A run that was stopped or preempted waits for nothing: whoever continues it serves the same
        metrics.
        """
        self._closing.set()
        linger = self.config.observability.prometheus_linger_seconds
        self._thread.join(linger + _PARTING_SECONDS)

    def _work(self) -> None:
        try:
            self._start()
            # No endpoint before this: it would serve counters that are too low.
            self._read()
            while not self._closing.wait(self.poll_seconds):
                self._open()
                self._read()
            self._read()
            self._part()
        except Exception as error:
            self._warn(f"no metrics: {error}; training continues")
        finally:
            if self._endpoint is not None:
                self._endpoint.close()

    def _part(self) -> None:
        """Wait until Prometheus has the final values, if nobody will serve them again."""
        self._open()
        if self._endpoint is not None and self._metrics.has_ended:
            linger = self.config.observability.prometheus_linger_seconds
            self._endpoint.wait_for_scrape(linger)

    def _start(self) -> None:
        """Read the ledger first: a supervisor may have died before it wrote to the stream."""
        ledger = Ledger(LocalStorage(self.workspace.ledger), run_id=self.workspace.run_id)
        for event in counted(ledger.entries()):
            self._metrics.add(event)

    def _read(self) -> None:
        for item in unread(self.workspace.events, dict(self._offsets)):
            self._offsets[item.file] = item.offset
            with self._reading:
                self._metrics.add(item.event)

    def _open(self) -> None:
        """Start to serve, unless the port is in use; then try again later."""
        watching = self.config.observability
        port, host = watching.prometheus_port, watching.prometheus_host
        if self._endpoint is not None or port is None:
            return
        labels = (self.workspace.run_id, self.config.model_name)
        common = dict(zip(COMMON_LABELS, labels, strict=True))
        try:
            collector = RunCollector(common, self._samples)
            self._endpoint = Endpoint(port, collector, default_host() if host is None else host)
        except OSError as error:
            if not self._was_busy:
                self._was_busy = True
                where = "" if host is None else f", prometheus_host {host!r}"
                self._warn(
                    f"no metrics on observability.prometheus_port {port}{where}: "
                    f"{error.strerror}; "
                    "training continues, and the port is tried again"
                )

    def _samples(self) -> Samples:
        """Return the current values for one scrape."""
        with self._reading:
            samples = self._metrics.current()
        add_present(samples, self.config, self.workspace)
        return samples

    def _warn(self, message: str) -> None:
        """Add a warning to the run's events."""
        stream = self.workspace.stream("prometheus")
        stream.emit(Warned(stage="train", message=redact(message)))
        stream.close()
