"""An attempt as its supervisor sees it: through its folder, wherever its agents run."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from steadytrain.components.shared.config import RecoveryConfig, load
from steadytrain.components.shared.config.secrets import redact
from steadytrain.components.shared.output_log import Output, tail
from steadytrain.components.shared.periodic import Pulse
from steadytrain.components.shared.quantities import duration
from steadytrain.components.shared.storage import LocalStorage
from steadytrain.components.shared.storage.local import CACHED_SECONDS, Awaited
from steadytrain.components.train.agent.processes import KILL_SECONDS
from steadytrain.components.train.agent.ranks import OUTLIVE_SECONDS
from steadytrain.components.train.attempt import (
    AttemptFolder,
    AttemptSpec,
    Beat,
    Exits,
    NodeFolder,
    RankError,
)
from steadytrain.components.train.failures import CRASHES

_SLACK_SECONDS = KILL_SECONDS + 10.0
"""How long an agent may need beyond the grace period to end its ranks and report it."""


@dataclass(frozen=True)
class AgentExit:
    """An agent that has ended.

    status: its exit status (negative: a signal); None if it is unknown here.
    """

    status: int | None = None


class AgentAttempt:
    """The ranks of an attempt, seen through their agents.

    If the ranks of one node have failed, the other nodes' ranks get a few seconds to exit, because
    none of them can continue alone.

    Args:
        gone: how a node's agent ended, as far as is known; None if it has not. Everything else is
            in the folder.
        started: whether the process or pod of a node's agent has started.
        pending_seconds: how long that may take. After that, an agent has
            recovery.start_timeout_seconds for its first sign of life.
        nodes: number of nodes, each with one agent.
    """

    def __init__(
        self,
        folder: AttemptFolder,
        gone: Callable[[int], AgentExit | None],
        *,
        started: Callable[[int], bool] = lambda _: True,
        pending_seconds: float = 0.0,
        nodes: int = 1,
    ) -> None:
        self.folder = folder
        recovery = load(Path(AttemptSpec.load(folder.spec).config)).recovery
        self._nodes = [
            _Node(
                number,
                folder.node(number),
                partial(gone, number),
                partial(started, number),
                recovery,
                pending_seconds,
            )
            for number in range(nodes)
        ]
        self._deadline = self._others_deadline = float("inf")

    def poll(self) -> bool:
        """Return whether all ranks have exited or their agent is lost; the folder says which."""
        overdue = time.monotonic() >= self._deadline
        down = [node.exited(overdue=overdue) for node in self._nodes]
        if not all(down) and any(node.failed for node in self._nodes):
            self._end_stragglers()
        return all(down)

    def stop(self, grace_seconds: float) -> None:
        """Ask every rank to exit (SIGTERM, then SIGKILL); return at once.

        A later call with a shorter grace period shortens the first one.
        """
        LocalStorage(self.folder.path).write(self.folder.leave.name, str(grace_seconds).encode())
        self._deadline = min(self._deadline, time.monotonic() + grace_seconds + _SLACK_SECONDS)

    def exits(self) -> Mapping[int, int]:
        """Return the exit status by rank (negative: a signal), the earliest failure first.

        Successful ranks may be missing; ranks whose agent was lost are missing.
        """
        reports = [node.exits for node in self._nodes if node.exits is not None]
        reports.sort(key=lambda exits: exits.time)
        return {rank: status for exits in reports for rank, status in exits.statuses.items()}

    def _end_stragglers(self) -> None:
        now = time.monotonic()
        self._others_deadline = min(self._others_deadline, now + OUTLIVE_SECONDS)
        if now >= self._others_deadline:
            self._others_deadline = float("inf")
            self.stop(0)


class _Node:
    """One node's agent. It counts as lost after a lease period without a sign of life."""

    def __init__(
        self,
        number: int,
        folder: NodeFolder,
        gone: Callable[[], AgentExit | None],
        started: Callable[[], bool],
        recovery: RecoveryConfig,
        pending_seconds: float,
    ) -> None:
        self.number, self.folder, self.gone, self.started = number, folder, gone, started
        self.recovery, self.pending_seconds = recovery, pending_seconds
        self.exits: Exits | None = None
        self.lost = False
        self._pulse, self._awaited = Pulse(), Awaited(folder.exits)
        self._succeeded: float | None = None
        self._beat: Beat | None = None

    @property
    def failed(self) -> bool:
        return self.lost or (self.exits is not None and any(self.exits.statuses.values()))

    def exited(self, *, overdue: bool) -> bool:
        """Return whether the ranks of this node have exited, or the node is lost.

        Args:
            overdue: whether the time for ending the ranks is up.
        """
        if self.lost or self.exits is not None:
            return True
        # In this order, because an agent writes the exits before it ends.
        gone = self.gone()
        if self._awaited.there(surely=gone is not None):
            self.exits = Exits.load(self.folder.exits)
            return True
        if gone and gone.status == 0 and self._may_be_late():
            return False
        beat, started = self._read_beat(), self.started()
        silence = self._pulse.silence((beat, started))
        if gone:
            self._lose(*self._end(gone))
        elif beat is None and silence > self._start_seconds(started=started):
            self._lose("Hang", self._silent_start(silence), still_since=time.time() - silence)
        elif beat is not None and silence > self.recovery.lease_seconds:
            self._lose("AgentLost", f"gave no sign of life for {duration(silence)}")
        elif overdue:
            self._lose("AgentLost", "did not stop the ranks when asked to")
        return self.lost

    def _may_be_late(self) -> bool:
        """Return whether the report of a successful agent may still be on its way to this node."""
        now = time.monotonic()
        self._succeeded = self._succeeded or now
        return now - self._succeeded < CACHED_SECONDS

    def _read_beat(self) -> Beat | None:
        """Return the agent's last beat; the last known one if it cannot be read now."""
        try:
            self._beat = Beat.read(self.folder.heartbeat)
        except OSError:
            self._pulse.excuse()
        return self._beat

    def _start_seconds(self, *, started: bool) -> float:
        limit = self.recovery.start_timeout_seconds
        return limit if started else self.pending_seconds + limit

    def _silent_start(self, silence: float) -> str:
        last_line = tail(self.folder.log).rstrip().rpartition("\n")[2]
        return (
            f"gave no sign of life for {duration(silence)} after its scheduled start "
            f"(recovery.start_timeout_seconds); its log, {self.folder.log}, "
            + (f"ends with: {last_line}" if last_line else "is empty")
        )

    def _end(self, gone: AgentExit) -> tuple[str, str, str]:
        """Return the error class, message and traceback of an agent that ended without a report."""
        output, status = Output.of(tail(self.folder.log)), gone.status
        uncaught = status == 1 or (status is None and not output.after.strip())
        if output.traceback and uncaught:
            kind, _, message = output.error.partition(": ")
            return kind, f"failed: {message or kind}; see {self.folder.log}", output.traceback
        kind = "Crashed" if status is not None and -status in CRASHES else "AgentLost"
        how = "" if status is None else f", exit status {status}"
        last = f"ends with: {output.last_line}" if output.last_line else "is empty"
        return kind, f"ended without an error message{how}; its log, {self.folder.log}, {last}", ""

    def _lose(self, kind: str, what: str, traceback: str = "", *, still_since: float = 0.0) -> None:
        self.lost = True
        if Awaited(self.folder.error).there():
            return  # the launcher or the agent knew more
        RankError(
            kind=kind,
            message=redact(f"the agent of node {self.number} {what}"),
            traceback=redact(traceback),
            still_since=still_since,
        ).save(self.folder.error)
