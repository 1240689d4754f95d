"""A run's metrics now, while it trains."""

from __future__ import annotations

import threading
import time

from steadytrain.components.observe.run_metrics import RunMetrics
from steadytrain.components.observe.samples import Samples
from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.events import Cursor
from steadytrain.components.shared.tracking.spool import waiting
from steadytrain.components.shared.workspace import Workspace


def add_present(samples: Samples, config: RunConfig, workspace: Workspace) -> None:
    """Add the budget, and what MLflow lacks now."""
    budget = config.observability.budget_usd
    if budget is not None:
        samples.set("cost_budget_usd", budget)
    if "mlflow" in config.tracking.sinks:
        waits = waiting(workspace)
        samples.set("sink_queue_bytes", waits.bytes)
        oldest = waits.oldest
        samples.set("sink_lag_seconds", max(0.0, time.time() - oldest) if oldest else 0.0)


class LiveMetrics:
    """Follows a run's events, and computes its metrics from all of them."""

    def __init__(self, config: RunConfig, workspace: Workspace) -> None:
        self.config, self.workspace = config, workspace
        self._metrics, self._lock = RunMetrics(), threading.Lock()
        self._cursor = Cursor(workspace.events)

    @property
    def has_ended(self) -> bool:
        return self._metrics.has_ended

    def read(self) -> None:
        """Add the new events."""
        for item in self._cursor.read():
            with self._lock:
                self._metrics.add(item.event)
        self._cursor.ack()

    def samples(self) -> Samples:
        """Return the current values, in any thread."""
        with self._lock:
            samples = self._metrics.current()
        add_present(samples, self.config, self.workspace)
        return samples
