"""MLflow as a sink of the event stream: never slow, never in the way.

Events wait in a bounded queue for a thread that sends them in batches. What
cannot be sent in time is not lost: the events files hold it, and `replay`
sends it when MLflow is there again.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time

from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.errors import SteadytrainError
from steadytrain.components.shared.events import Event
from steadytrain.components.shared.tracking.connect import brisk, open_tracking
from steadytrain.components.shared.tracking.delivery import Delivery, wanted
from steadytrain.components.shared.tracking.notes import UNDELIVERED, forget, recall, remember, warn
from steadytrain.components.shared.tracking.run import continue_run
from steadytrain.components.shared.workspace import Workspace

BATCH_SECONDS = 2.0
CLOSE_SECONDS = 15.0
FIRST_DELAY_SECONDS, LAST_DELAY_SECONDS = 2.0, 60.0
CAPACITY = 10_000


class MlflowSink:
    """Sends training's events to MLflow.

    Args:
        batch_seconds: how long events are gathered before they are sent.
        close_seconds: longest wait for the rest in `close`.
        capacity: events held in memory while MLflow does not answer.
    """

    def __init__(
        self,
        config: RunConfig,
        workspace: Workspace,
        *,
        batch_seconds: float = BATCH_SECONDS,
        close_seconds: float = CLOSE_SECONDS,
        capacity: int = CAPACITY,
    ) -> None:
        self.config, self.workspace = config, workspace
        self.batch_seconds, self.close_seconds = batch_seconds, close_seconds
        self._waiting: queue.Queue[Event] = queue.Queue(capacity)
        self._closing = threading.Event()
        self._delivery: Delivery | None = None
        self._unsent: list[Event] = []
        self._delay, self._not_before = FIRST_DELAY_SECONDS, 0.0
        # An earlier supervisor that was killed may have left something unsent.
        self._owed = bool(recall(workspace, UNDELIVERED))
        self._all_sent = self._warned = False
        remember(workspace, UNDELIVERED, "yes")
        self._thread = threading.Thread(target=self._work, name="mlflow-sink", daemon=True)
        self._thread.start()

    def emit(self, event: Event) -> None:
        if not wanted(event):
            return
        try:
            self._waiting.put_nowait(event)
        except queue.Full:
            self._owed = True

    def close(self) -> None:
        """Sends what is left, for at most `close_seconds`."""
        self._closing.set()
        self._thread.join(self.close_seconds)
        if self._thread.is_alive():
            self._warn(f"MLflow has not answered for {self.close_seconds:.0f} s")
        elif self._all_sent and not self._owed:
            forget(self.workspace, UNDELIVERED)

    def _work(self) -> None:
        with brisk():
            while not self._closing.wait(self.batch_seconds):
                if time.monotonic() >= self._not_before:
                    self._send_waiting()
            self._all_sent = self._send_waiting()

    def _send_waiting(self) -> bool:
        """Sends what waits; where MLflow refuses, the next try comes later, and then later."""
        while events := self._unsent or self._drain():
            self._unsent = events
            try:
                self._send(events)
            except SteadytrainError as error:
                self._warn(error.message)
                self._not_before = time.monotonic() + self._delay
                self._delay = min(self._delay * 2, LAST_DELAY_SECONDS)
                return False
            self._unsent, self._delay = [], FIRST_DELAY_SECONDS
        return True

    def _drain(self) -> list[Event]:
        events: list[Event] = []
        with contextlib.suppress(queue.Empty):
            while True:
                events.append(self._waiting.get_nowait())
        return events

    def _send(self, events: list[Event]) -> None:
        if self._delivery is None:
            tracking = open_tracking(self.config, self.workspace)
            run_id = continue_run(tracking, self.config, self.workspace)
            self._delivery = Delivery(tracking, self.workspace, run_id)
        self._delivery.send(events)

    def _warn(self, reason: str) -> None:
        if self._warned:
            return
        self._warned = True
        warn(
            self.workspace,
            f"{reason}; training goes on, and its metrics are sent at the run's end",
        )
