"""The alerts about runs: what each one means, what to do, and the sink that sends them."""

from __future__ import annotations

import json
import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

from steadytrain.components.observe.background import Background
from steadytrain.components.observe.metrics import Series
from steadytrain.components.observe.run_metrics import LiveMetrics
from steadytrain.components.shared import webhook
from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.config.secrets import redact
from steadytrain.components.shared.log import (
    GPU_UTIL_LOW,
    LOW_UTILIZATION,
    LOW_UTILIZATION_SECONDS,
)
from steadytrain.components.shared.storage import LocalStorage
from steadytrain.components.shared.workspace import Workspace

Severity = Literal["warning", "critical"]


@dataclass(frozen=True)
class Alert:
    """One alert rule.

    expression: PromQL over metrics of the registry; the alert fires for each series that it yields.
    holds: whether it fires for a run's own series; says the same as `expression`.
    pending: how long that must last, as a Prometheus duration in minutes.
    meaning: one sentence about the run; `{{ $labels.run }}` stands for its name.
    remedy: what to do.
    """

    name: str
    severity: Severity
    expression: str
    holds: Callable[[Series], bool]
    pending: str
    meaning: str
    remedy: str

    @property
    def pending_seconds(self) -> float:
        return 60.0 * float(self.pending.removesuffix("m"))


def _age(timestamp: str) -> str:
    """Return the seconds since a time, or since the attempt started if that is later."""
    started = "attempt_started_timestamp_seconds"
    return f"time() - ({timestamp} > {started} or {started})"


_TRAINING: Final = "run_active == 1 and attempt_ready == 1"
_RUN: Final = "Run {{ $labels.run }}"


def _trains(series: Series) -> bool:
    return series.value("run_active") == 1 and series.value("attempt_ready") == 1


def _diverges(series: Series) -> bool:
    loss = series.value("training_loss")
    before = series.mean("training_loss", 600, offset=1800)
    return (
        ("training_loss" in series.names and math.isnan(loss))
        or series.increase("divergences", 1800) > 0
        or series.mean("training_loss", 600) > 1.5 * before
    )


ALERTS: Final = (
    Alert(
        "SteadytrainNoProgress",
        "critical",
        f"{_TRAINING} and {_age('last_step_timestamp_seconds')} > 1800",
        lambda series: _trains(series) and series.age("last_step_timestamp_seconds") > 1800,
        "0m",
        f"{_RUN} has reported no step for 30 minutes, although its ranks are ready.",
        "Read `steadytrain explain RUN` and the ranks' logs. If a step takes that long, set "
        "training.logging_steps to 1; otherwise lower recovery.hang_timeout_seconds.",
    ),
    Alert(
        "SteadytrainLowGoodput",
        "warning",
        "run_active == 1 and goodput < 0.5 and sum without (phase) (run_seconds) > 3600",
        lambda series: (
            series.value("run_active") == 1
            and series.value("goodput") < 0.5
            and series.value("run_seconds") > 3600
        ),
        "15m",
        f"Less than half of the time of {_RUN.lower()} was useful.",
        "Look at run_seconds by phase and at lost_seconds_total by class: `steadytrain explain "
        "RUN` has the fix for each failure.",
    ),
    Alert(
        "SteadytrainGpuUtilLow",
        "warning",
        f"{_TRAINING} and avg_over_time(gpu_utilization[{LOW_UTILIZATION_SECONDS / 60:.0f}m]) < "
        f"{LOW_UTILIZATION}",
        lambda series: (
            _trains(series)
            and series.mean("gpu_utilization", LOW_UTILIZATION_SECONDS) < LOW_UTILIZATION
        ),
        "5m",
        f"The GPU of rank 0 of {_RUN.lower()} is busy for less than half of the time.",
        GPU_UTIL_LOW.remedy,
    ),
    Alert(
        "SteadytrainLossDiverging",
        "warning",
        "training_loss != training_loss or increase(divergences_total[30m]) > 0 or "
        "avg_over_time(training_loss[10m]) > 1.5 * avg_over_time(training_loss[10m] offset 30m)",
        _diverges,
        "5m",
        f"The loss of {_RUN.lower()} is rising or not finite.",
        "A divergence is retried with a lower learning rate by itself. If the loss keeps rising, "
        "lower training.learning_rate (steadytrain adjust), and check the newest data.",
    ),
    Alert(
        "SteadytrainOverBudget",
        "critical",
        "cost_usd_total > cost_budget_usd",
        lambda series: series.value("cost_usd") > series.value("cost_budget_usd"),
        "0m",
        f"{_RUN} has cost more than its budget (observability.budget_usd).",
        "`steadytrain stop RUN` stops it with a checkpoint; it can be continued later. Otherwise "
        "raise the budget.",
    ),
    Alert(
        "SteadytrainCheckpointTooOld",
        "warning",
        f"{_TRAINING} and {_age('last_checkpoint_timestamp_seconds')} > 7200",
        lambda series: _trains(series) and series.age("last_checkpoint_timestamp_seconds") > 7200,
        "0m",
        f"{_RUN} has committed no checkpoint for two hours, and would lose that work.",
        "Check the storage, and set a smaller training.save_steps, or leave it out: the run then "
        "saves as often as failures require.",
    ),
    Alert(
        "SteadytrainQueuedTooLong",
        "warning",
        "run_active == 1 and attempt_ready == 0 and "
        "time() - attempt_started_timestamp_seconds > 1800",
        lambda series: (
            series.value("run_active") == 1
            and series.value("attempt_ready") == 0
            and series.age("attempt_started_timestamp_seconds") > 1800
        ),
        "0m",
        f"The ranks of {_RUN.lower()} have not become ready for 30 minutes.",
        "Look at the pods and at the queue: they lack a node, quota or the image. "
        "`steadytrain plan --cluster` shows what the cluster has.",
    ),
    Alert(
        "SteadytrainSinkLagging",
        "warning",
        "sink_lag_seconds > 600",
        lambda series: series.value("sink_lag_seconds") > 600,
        "5m",
        f"MLflow lacks events of {_RUN.lower()} that are older than 10 minutes.",
        "Check the tracking server. Nothing is lost: the run sends the events when it answers.",
    ),
)


EVERY_SECONDS: Final = 15.0
_UNSENT: Final = 100
"""Most messages that wait for a webhook that does not answer. The oldest are dropped."""


class AlertState:
    """The alerts of a run that fire.

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
