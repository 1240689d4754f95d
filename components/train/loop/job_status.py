"""Progress for Kubernetes: `status.trainerStatus` of the attempt's TrainJob.

Trainer 2.2 and later, with its feature gate TrainJobStatus, sets three variables in the pods
of a TrainJob: the address of its status server, its certificate authority and a token. Rank 0 posts
its progress there (KEP-2779 of kubeflow/trainer). Without the variables, nothing is sent.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import singledispatchmethod
from pathlib import Path
from typing import Any, Final

from steadytrain.components.shared.events import Event
from steadytrain.components.shared.events.types import (
    TrainingFinished,
    TrainingStarted,
    TrainingStep,
    Validated,
)
from steadytrain.components.shared.periodic import Periodic

ADDRESS: Final = "KUBEFLOW_TRAINER_SERVER_URL"
AUTHORITY: Final = "KUBEFLOW_TRAINER_SERVER_CA_CERT"
TOKEN: Final = "KUBEFLOW_TRAINER_SERVER_TOKEN"
EVERY_SECONDS: Final = 5.0
"""Time between two updates at least. The server limits the rate."""
UPDATE_SECONDS: Final = 5.0
"""Longest time for an update."""
_METRICS, _NAME = 50, 64
"""Metrics of one update and characters of a name at most. The server takes no longer name, and no
update of more than 64 kB."""


@dataclass
class TrainerStatus:
    """What is known of an attempt's progress.

    began: time and step at which the ranks were ready; None before.
    """

    began: tuple[float, int] | None = None
    max_steps: int = 0
    step: int = 0
    time: float = 0.0
    finished: bool = False
    metrics: dict[str, float] = field(default_factory=dict)

    @singledispatchmethod
    def add(self, event: Event) -> bool:
        """Take an event. Return whether it says something about progress."""
        del event
        return False

    @add.register
    def _(self, event: TrainingStarted) -> bool:
        self.began, self.max_steps = (event.time, event.step), event.max_steps
        self.step, self.time = event.step, event.time
        return True

    @add.register
    def _(self, event: TrainingStep) -> bool:
        self.step, self.time = event.step, event.time
        self.metrics |= {
            "step": event.step,
            "max_steps": self.max_steps,
            "epoch": event.epoch,
            "loss": event.loss,
            "learning_rate": event.learning_rate,
            "tokens_per_second": event.tokens_per_second,
        }
        return True

    @add.register
    def _(self, event: Validated) -> bool:
        self.metrics |= {f"eval_{name}": value for name, value in event.metrics.items()}
        return True

    @add.register
    def _(self, event: TrainingFinished) -> bool:
        self.step, self.time, self.finished = event.step, event.time, True
        return True

    def as_data(self) -> dict[str, Any]:
        """Return the object `trainerStatus`, as the server takes it.

        It has finite metrics whose names have up to 64 characters: for another one, the server
        would refuse the update.
        """
        result: dict[str, Any] = {
            "lastUpdatedTime": datetime.fromtimestamp(self.time, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        }
        if self.finished:
            result |= {"progressPercentage": 100, "estimatedRemainingSeconds": 0}
        elif self.began is not None and self.max_steps:
            result["progressPercentage"] = min(99, 100 * self.step // self.max_steps)
            start, first = self.began
            if self.step > first:
                each = max(0.0, self.time - start) / (self.step - first)
                result["estimatedRemainingSeconds"] = round(each * (self.max_steps - self.step))
        taken = [
            {"name": name, "value": f"{value:.6g}"}
            for name, value in self.metrics.items()
            if math.isfinite(value) and len(name) <= _NAME
        ]
        result["metrics"] = taken[:_METRICS]
        return result


class JobStatus:
    """A sink of rank 0's events that posts the newest progress from a separate thread.

    Training waits for it only at its end: for the update that is under way, if any, and for the
    last one. If the server refuses or is away, a later update brings the same, and the first time
    is a warning.

    Args:
        warn: takes the warning.
        every: seconds between two updates at least.
        seconds: longest time for an update.
    """

    def __init__(
        self,
        warn: Callable[[str], None],
        *,
        every: float = EVERY_SECONDS,
        seconds: float = UPDATE_SECONDS,
    ) -> None:
        # Here, because on a busy machine the import takes most of the time that an update has.
        from steadytrain.components.shared import http_client

        self._http = http_client
        self.address, self.warn, self.seconds = os.environ[ADDRESS], warn, seconds
        self.status = TrainerStatus()
        self._lock, self._changed, self._warned = threading.Lock(), False, False
        self._thread = Periodic("job-status", self._send, every=every, finish=self._send)

    def emit(self, event: Event) -> None:
        with self._lock:
            self._changed |= self.status.add(event)

    def close(self) -> None:
        """Send what is new, after the update that is under way."""
        self._thread.end(2 * self.seconds)

    def _send(self) -> None:
        with self._lock:
            if not self._changed:
                return
            content, self._changed = {"trainerStatus": self.status.as_data()}, False
        if why := self._post(content):
            with self._lock:
                self._changed = True
            if not self._warned:
                self._warned = True
                self.warn(
                    f"the TrainJob's status is not updated: {self.address}: {why}; training "
                    "continues, and later updates are tried"
                )

    def _post(self, content: dict[str, Any]) -> str:
        """Post an update. Return why it was not accepted; "" if it was."""
        try:
            # The kubelet replaces the token before it expires.
            token = Path(os.environ.get(TOKEN, "")).read_text().strip()
            authority = os.environ.get(AUTHORITY)
            with self._http.session() as opened, self._http.deadline(self.seconds):
                answer = opened.post(
                    self.address,
                    json=content,
                    headers={"Authorization": f"Bearer {token}"},
                    verify=authority or True,
                    timeout=self.seconds,
                    allow_redirects=False,
                )
        except (OSError, self._http.LimitExceeded) as error:
            return self._http.why_absent(error)
        return "" if answer.ok else f"status {answer.status_code}"


def is_reported() -> bool:
    """Return whether this pod's TrainJob takes progress."""
    return bool(os.environ.get(ADDRESS))
