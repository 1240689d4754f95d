"""The alerts as a sink: calls the webhook when one fires, and when it ends. Needs no Prometheus."""

from __future__ import annotations

import json
import time
from collections import deque
from typing import Final

from steadytrain.components.observe.alerts import ALERTS, Alert
from steadytrain.components.observe.background import Background
from steadytrain.components.observe.live import LiveMetrics
from steadytrain.components.observe.samples import Series
from steadytrain.components.shared import webhook
from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.config.secrets import redact
from steadytrain.components.shared.storage import LocalStorage
from steadytrain.components.shared.workspace import Workspace

EVERY_SECONDS: Final = 15.0
_UNSENT: Final = 100
"""Most messages that wait for a webhook that does not answer. The oldest are dropped."""


class AlertState:
    """Which alerts of a run fire.

    Args:
        firing: names of those that were reported as firing.
    """

    def __init__(self, firing: set[str]) -> None:
        self.firing = firing
        self._since: dict[str, float] = {}

    def update(self, series: Series) -> list[tuple[Alert, bool]]:
        """Return the alerts that fire from now on (True), and those that have ended (False)."""
        changes = []
        for alert in ALERTS:
            if not alert.holds(series):
                self._since.pop(alert.name, None)
                if alert.name in self.firing:
                    self.firing.remove(alert.name)
                    changes.append((alert, False))
                continue
            since = self._since.setdefault(alert.name, series.now)
            if alert.name not in self.firing and series.now - since >= alert.pending_seconds:
                self.firing.add(alert.name)
                changes.append((alert, True))
        return changes


class AlertSink(Background):
    """Checks the alerts of a run every few seconds.

    The alerts that fire are kept in a file. So the next supervisor reports none of them again, and
    reports their end.
    """

    def __init__(
        self, config: RunConfig, workspace: Workspace, *, every: float = EVERY_SECONDS
    ) -> None:
        self.config = config
        self._metrics: LiveMetrics | None = None
        self._series = Series()
        self._state: AlertState | None = None
        self._unsent: deque[dict[str, str]] = deque(maxlen=_UNSENT)
        self._refusal = ""
        super().__init__("alerts", workspace, every=every)

    def work(self) -> None:
        """Read the new events, and report what has changed."""
        if self._metrics is None or self._state is None:
            self._metrics = LiveMetrics(self.config, self.workspace)
            self._state = self._reported()
        self._metrics.read()
        self._series.add(time.time(), self._metrics.samples())
        changes = self._state.update(self._series)
        self._unsent.extend(self._message(alert, fires) for alert, fires in changes)
        if self._unsent and self._sent():
            # Not before: an alert that is sent twice is better than one that is lost.
            storage = LocalStorage(self.workspace.folder)
            content = json.dumps(sorted(self._state.firing))
            storage.write(self.workspace.alerted.name, content.encode())

    def _reported(self) -> AlertState:
        path = self.workspace.alerted
        known = {alert.name for alert in ALERTS}
        return AlertState(set(json.loads(path.read_text())) & known if path.exists() else set())

    def _message(self, alert: Alert, fires: bool) -> dict[str, str]:
        meaning = alert.meaning.replace("{{ $labels.run }}", self.workspace.run_id)
        content = {
            "event": "alert_firing" if fires else "alert_resolved",
            "alert": alert.name,
            "severity": alert.severity,
            "run": self.workspace.run_id,
            "name": self.config.name,
            "text": meaning if fires else f"No longer: {meaning}",
            "remedy": alert.remedy if fires else "",
        }
        return {name: redact(text) for name, text in content.items() if text}

    def _sent(self) -> bool:
        """Send what waits, and return whether all of it is sent. The rest waits for a round."""
        while self._unsent:
            failure = webhook.call(self._unsent[0])
            if failure:
                if not self._refusal:
                    self.warn(f"the webhook ({webhook.VARIABLE}) got no alert: {failure}; retrying")
                self._refusal = failure
                return False
            self._refusal = ""
            self._unsent.popleft()
        return True
