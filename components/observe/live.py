"""A run's metrics now, while it trains."""

from __future__ import annotations

import threading

from steadytrain.components.observe.present import add_present
from steadytrain.components.observe.run_metrics import RunMetrics
from steadytrain.components.observe.samples import Samples
from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.events import Cursor
from steadytrain.components.shared.storage import LocalStorage
from steadytrain.components.shared.workspace import Workspace
from steadytrain.components.train.recovery.history import counted
from steadytrain.components.train.recovery.ledger import Ledger


class LiveMetrics:
    """Follows a run's events, and computes its metrics from all of them.

    It begins with the ledger: a supervisor may have died before it wrote to the event files.
    """

    def __init__(self, config: RunConfig, workspace: Workspace) -> None:
        self.config, self.workspace = config, workspace
        self._metrics, self._lock = RunMetrics(), threading.Lock()
        self._cursor = Cursor(workspace.events)
        ledger = Ledger(LocalStorage(workspace.ledger), run_id=workspace.run_id)
        for event in counted(ledger.entries()):
            self._metrics.add(event)

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
