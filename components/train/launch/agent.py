"""An attempt as its supervisor sees it: by the attempt's folder, wherever its agents run."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from steadytrain.components.shared.config import load
from steadytrain.components.shared.storage import LocalStorage
from steadytrain.components.train.agent.ranks import OUTLIVE_SECONDS
from steadytrain.components.train.attempt import (
    AttemptFolder,
    AttemptSpec,
    Exits,
    NodeFolder,
    RankError,
)
from steadytrain.components.train.heartbeat import Beat, Pulse

_SLACK_SECONDS = 10.0
"""What an agent may take beyond the grace to end its ranks and tell of it."""


class AgentAttempt:
    """The ranks of an attempt, through their agents.

    Where the ranks of one node are down and have not ended well, those of the others are
    given a few seconds to follow, since none of them can go on alone.

    Args:
        gone: whether the agent of a node is known to have ended; all else is in the folder.
        nodes: how many there are, with an agent each.
    """

    def __init__(
        self, folder: AttemptFolder, gone: Callable[[int], bool], *, nodes: int = 1
    ) -> None:
        self.folder = folder
        recovery = load(Path(AttemptSpec.load(folder.spec).config)).recovery
        self._nodes = [
            _Node(number, folder.node(number), partial(gone, number), recovery.lease_seconds)
            for number in range(nodes)
        ]
        self._deadline = self._others_deadline = float("inf")

    def poll(self) -> bool:
        """Whether all ranks are down, or their agent is lost: then the folder says so."""
        overdue = time.monotonic() >= self._deadline
        down = [node.down(overdue=overdue) for node in self._nodes]
        if not all(down) and any(node.failed for node in self._nodes):
            self._end_stragglers()
        return all(down)

    def stop(self, grace_seconds: float) -> None:
        """Asks every rank to leave (SIGTERM, then SIGKILL); returns at once.

        Called again with a shorter grace, it shortens the first.
        """
        LocalStorage(self.folder.path).write(self.folder.leave.name, str(grace_seconds).encode())
        self._deadline = min(self._deadline, time.monotonic() + grace_seconds + _SLACK_SECONDS)

    def exits(self) -> Mapping[int, int]:
        """Exit status by rank (negative: a signal), the earliest failure first.

        Ranks that ended well may be missing, and those whose agent was lost are.
        """
        told = [node.exits for node in self._nodes if node.exits is not None]
        told.sort(key=lambda exits: exits.time)
        return {rank: status for exits in told for rank, status in exits.statuses.items()}

    def _end_stragglers(self) -> None:
        now = time.monotonic()
        self._others_deadline = min(self._others_deadline, now + OUTLIVE_SECONDS)
        if now >= self._others_deadline:
            self._others_deadline = float("inf")
            self.stop(0)


class _Node:
    """One agent. Without a sign of life for the time of a lease it is lost."""

    def __init__(
        self, number: int, folder: NodeFolder, gone: Callable[[], bool], lease_seconds: float
    ) -> None:
        self.number, self.folder, self.gone = number, folder, gone
        self.lease_seconds = lease_seconds
        self.exits: Exits | None = None
        self.lost = False
        self._pulse = Pulse()

    @property
    def failed(self) -> bool:
        return self.lost or (self.exits is not None and any(self.exits.statuses.values()))

    def down(self, *, overdue: bool) -> bool:
        """Whether its ranks are down, or it is lost.

        Args:
            overdue: whether the time is up in which it had to take them down.
        """
        if self.lost or self.exits is not None:
            return True
        # In this order: an agent writes down the exits before it goes.
        gone = self.gone()
        if self.folder.exits.is_file():
            self.exits = Exits.load(self.folder.exits)
            return True
        beat = Beat.read(self.folder.heartbeat)
        silence = self._pulse.silence(beat) if beat else 0.0
        if gone:
            self._lose(f"ended without a word; see {self.folder.log}")
        elif silence > self.lease_seconds:
            self._lose(f"gave no sign of life for {silence:.0f} s")
        elif overdue:
            self._lose("did not take the ranks down when it was asked to")
        return self.lost

    def _lose(self, what: str) -> None:
        self.lost = True
        if self.folder.error.is_file():
            return  # the launcher, or the agent, knew more
        RankError(
            rank=0,
            time=time.time(),
            kind="NodeLost",
            message=f"the agent of node {self.number} {what}",
            traceback="",
            step=0,
        ).save(self.folder.error)
