"""Follows one attempt: events from its ranks, and requests to them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.errors import Stopped, StorageError
from steadytrain.components.shared.events import Cursor, Event, Reader, Sink
from steadytrain.components.shared.events.types import (
    AttemptOutcome,
    AttemptStarted,
    CheckpointSaved,
    PodWaited,
    TrainingStep,
    Validated,
    Warned,
)
from steadytrain.components.shared.lease import Lease
from steadytrain.components.shared.periodic import Pulse, pause
from steadytrain.components.shared.retry import FOREVER, REJECTED_SECONDS, Retry, any_error
from steadytrain.components.shared.stopping import StopRequest
from steadytrain.components.shared.storage import LocalStorage
from steadytrain.components.shared.storage.local import Awaited
from steadytrain.components.shared.workspace import Workspace
from steadytrain.components.train.attempt import AttemptFolder
from steadytrain.components.train.launch.launcher import RunningAttempt
from steadytrain.components.train.recovery.adjust import take
from steadytrain.components.train.recovery.history import State, is_of_rank
from steadytrain.components.train.recovery.ledger import Ledger
from steadytrain.components.train.recovery.times import pods_waited

POLL_SECONDS = 0.1
DELETED_SECONDS = 10.0
"""How long the run's events are gone before the attempt ends: nobody would see the rest of it."""
_REJECTED_DELAYS = (1.0, 1.0)
"""Seconds between two tries to record what the ranks reported."""


class Supervising(Protocol):
    """The parts of a supervisor that watching an attempt needs; failing sinks are removed."""

    config: RunConfig
    workspace: Workspace
    ledger: Ledger
    lease: Lease
    sinks: Sequence[Reader]
    on_validation: Callable[[Validated], bool] | None


class Watch:
    """Follows one attempt: passes its events to the ledger and sinks, and requests to its ranks."""

    def __init__(
        self, supervisor: Supervising, folder: AttemptFolder, request: StopRequest, *, step: int
    ) -> None:
        self.supervisor, self.folder, self.request = supervisor, folder, request
        self.step, self.saved = step, False
        self.pruned, self.adjusts = False, False
        self._asked = Awaited(supervisor.workspace.adjust)
        self._unrecorded = deque[State]()
        self._retry = Retry(
            transient=any_error, seconds=FOREVER, delays=_REJECTED_DELAYS, report=self._warn
        )
        self._waits: list[PodWaited] = []
        self.cursor = Cursor(supervisor.workspace.events)
        self.cursor.skip_to_end()
        self.stream = supervisor.workspace.lines("supervisor")

    @property
    def requested(self) -> AttemptOutcome | None:
        """The requested outcome, or None."""
        return self.request.outcome or ("pruned" if self.pruned else None)

    def record(self, event: Event) -> None:
        """Record one of the supervisor's own events, after pending events from the ranks.

        Raises:
            StorageError: the ledger could not be written for REJECTED_SECONDS.
            RunBusy: another supervisor has taken over the run.
        """
        while self._unrecorded:
            self.supervisor.ledger.record(self._unrecorded[0], seconds=REJECTED_SECONDS)
            self._unrecorded.popleft()
        self.supervisor.ledger.emit(self.stream.by_run_clock(event), self.stream)
        self._relay()

    def follow(self, ranks: RunningAttempt) -> None:
        """Wait until all ranks have exited.

        Raises:
            RunBusy: another supervisor has taken over the run.
            StorageError: the folder of the run's events was deleted.
        """
        there = Pulse()
        grace = self.supervisor.config.recovery.stop_grace_seconds
        lease, stopping, urgent = self.supervisor.lease, False, False
        began = time.monotonic()
        while not ranks.poll():
            self._relay()
            if there.silence(self._is_there()) > DELETED_SECONDS and not there.seen:
                raise StorageError(
                    f"{self.cursor.folder} was deleted while the run trained",
                    remedy="start the run again; it continues if its folder has a checkpoint",
                    lasting=True,
                )
            if lease.lost:
                lease.fence()
            if self.request.outcome and not stopping:
                ranks.stop(grace)
                stopping = True
            if not self.adjusts and self._asked.there():
                self.adjusts = self._has_adjust_request()
                if self.adjusts and not self.pruned:
                    self._stop("stopped")
            if self.request.urgent and not urgent:
                ranks.stop(0)
                urgent = True
            pause(began, POLL_SECONDS)
        self._relay()

    def _has_adjust_request(self) -> bool:
        """Return whether a person asks for a change. Set a request aside that cannot be used."""
        adjustment, problem = take(self.supervisor.workspace, self.supervisor.config)
        if problem:
            self.stream.emit(Warned(stage="train", message=problem))
        return adjustment is not None

    def _stop(self, outcome: AttemptOutcome) -> None:
        """Ask the ranks to save a checkpoint and end."""
        LocalStorage(self.folder.path).write(self.folder.stop.name, outcome.encode())

    def waited(self, started: AttemptStarted) -> float:
        """Return how many seconds the pods of the attempt waited before they started."""
        return pods_waited(started, self._waits, time.time())

    def close(self) -> None:
        self.stream.close()

    def _is_there(self) -> bool:
        """Return whether the ranks' events can be read. A file system may be away for a while."""
        try:
            self.cursor.folder.stat()
        except FileNotFoundError:
            return False
        except OSError:
            pass
        return True

    def _relay(self) -> None:
        for event in self.cursor.new():
            self.saved |= isinstance(event, CheckpointSaved)
            if is_of_rank(event):
                self._unrecorded.append(event)
            if isinstance(event, PodWaited):
                self._waits.append(event)
            if isinstance(event, CheckpointSaved | TrainingStep | Validated):
                self.step = max(self.step, event.step)
            for sink in list(self.supervisor.sinks):
                if isinstance(sink, Sink):
                    self._hand(sink, event)
            if isinstance(event, Validated):
                self._judge(event)
        self._record()

    def _record(self) -> None:
        """Record the ranks' events. If storage refuses, retry later; training continues."""
        if not self._retry.due:
            return
        while self._unrecorded:
            try:
                self.supervisor.ledger.record(self._unrecorded[0])
            except StorageError as error:
                self._retry.may_pass(error)
                return
            self._unrecorded.popleft()
        self._retry.reset()

    def _warn(self, why: str) -> None:
        self.stream.emit(Warned(stage="train", message=f"{why}; retrying"))

    def _hand(self, sink: Sink, event: Event) -> None:
        """Pass an event to a sink. Remove the sink if it fails; training continues."""
        try:
            sink.emit(event)
        except Stopped:
            raise
        except (Exception, SystemExit) as error:
            self.supervisor.sinks = [other for other in self.supervisor.sinks if other is not sink]
            self.stream.emit(
                Warned(
                    stage="train",
                    message=f"{type(sink).__name__} failed and receives no more events: {error}",
                )
            )

    def _judge(self, event: Validated) -> None:
        judge = self.supervisor.on_validation
        if judge is not None and not self.pruned and not judge(event):
            self.pruned = True
            self._stop("pruned")
