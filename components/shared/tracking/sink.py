"""MLflow as a sink of the event stream. It never slows down or blocks training.

A thread reads the events that MLflow lacks from the run's files and sends them in batches. So
nothing waits in memory, and nothing is lost if this process dies. The next sink, or the end of the
run, continues where this one stopped.
"""

from __future__ import annotations

import threading
import time

from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.errors import SteadytrainError
from steadytrain.components.shared.events import Event
from steadytrain.components.shared.quantities import duration
from steadytrain.components.shared.tracking.connect import brisk, open_tracking
from steadytrain.components.shared.tracking.delivery import Delivery
from steadytrain.components.shared.tracking.notes import warn
from steadytrain.components.shared.tracking.run import continue_run
from steadytrain.components.shared.workspace import Workspace

BATCH_SECONDS = 2.0
CLOSE_SECONDS, CLOSE_SECONDS_UNANSWERED = 15.0, 3.0
FIRST_DELAY_SECONDS, LAST_DELAY_SECONDS = 2.0, 60.0


class MlflowSink:
    """Sends training events to MLflow, including those that an earlier sink could not send.

    Args:
        config: the run's configuration.
        workspace: the run's workspace.
        batch_seconds: how long to collect events before sending them.
        close_seconds: how long `close` waits for the remaining events.
    """

    def __init__(
        self,
        config: RunConfig,
        workspace: Workspace,
        *,
        batch_seconds: float = BATCH_SECONDS,
        close_seconds: float = CLOSE_SECONDS,
    ) -> None:
        self.config, self.workspace = config, workspace
        self.batch_seconds, self.close_seconds = batch_seconds, close_seconds
        self._closing, self._abandoned = threading.Event(), threading.Event()
        self._delivery: Delivery | None = None
        self._delay, self._not_before = FIRST_DELAY_SECONDS, 0.0
        self._refused = self._warned = False
        self._thread = threading.Thread(target=self._work, name="mlflow-sink", daemon=True)
        self._thread.start()

    def emit(self, event: Event) -> None:
        """Do nothing: the thread reads the event from its file."""

    def close(self) -> None:
        """Send the remaining events within `close_seconds`, or less if MLflow did not respond."""
        self._closing.set()
        limit = self.close_seconds
        if self._refused:
            limit = min(limit, CLOSE_SECONDS_UNANSWERED)
        self._thread.join(limit)
        if self._thread.is_alive():
            self._abandoned.set()
            self._warn(f"MLflow has not answered for {duration(limit)}")

    def _work(self) -> None:
        with brisk():
            while not self._closing.wait(self.batch_seconds):
                if time.monotonic() >= self._not_before:
                    self._send()
            self._send()

    def _send(self) -> None:
        """Send what MLflow lacks. After an error, wait before the next try, longer each time."""
        try:
            if self._delivery is None:
                self._delivery = self._open()
            self._delivery.catch_up(give_up=self._abandoned.is_set)
        except SteadytrainError as error:
            self._delivery, self._refused = None, True
            self._warn(error.message)
            self._not_before = time.monotonic() + self._delay
            self._delay = min(self._delay * 2, LAST_DELAY_SECONDS)
        else:
            self._delay, self._refused = FIRST_DELAY_SECONDS, False

    def _open(self) -> Delivery:
        tracking = open_tracking(self.config, self.workspace)
        run_id = continue_run(tracking, self.config, self.workspace)
        return Delivery(tracking, self.workspace, run_id)

    def _warn(self, reason: str) -> None:
        if self._warned:
            return
        self._warned = True
        warn(
            self.workspace,
            f"{reason}; training continues, and its metrics are sent when MLflow answers again, "
            "or at the end of the run",
        )
