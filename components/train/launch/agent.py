"""An attempt as its supervisor sees it: by the attempt's folder, wherever its agent runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path

from steadytrain.components.shared.config import load
from steadytrain.components.shared.storage import LocalStorage
from steadytrain.components.train.attempt import AttemptFolder, AttemptSpec, Exits, RankError
from steadytrain.components.train.heartbeat import Beat, Pulse

_SLACK_SECONDS = 10.0
"""What an agent may take beyond the grace to end its ranks and tell of it."""


class AgentAttempt:
    """The ranks of an attempt, through their agent.

    An agent without a sign of life for the time of a lease is lost.

    Args:
        gone: whether the agent is known to have ended; all else is in the folder.
    """

    def __init__(self, folder: AttemptFolder, gone: Callable[[], bool]) -> None:
        self.folder, self.gone = folder, gone
        recovery = load(Path(AttemptSpec.load(folder.spec).config)).recovery
        self.silence_seconds = recovery.lease_seconds
        self._pulse, self._deadline = Pulse(), float("inf")

    def poll(self) -> bool:
        """Whether all ranks are down, or their agent is lost: then the folder says so."""
        # In this order: an agent writes down the exits before it goes.
        gone = self.gone()
        if self.folder.exits.is_file():
            return True
        beat = Beat.read(self.folder.agent_heartbeat)
        silence = self._pulse.silence(beat) if beat else 0.0
        if gone:
            self._lost(f"the agent ended without a word; see {self.folder.agent_log}")
        elif silence > self.silence_seconds:
            self._lost(f"the agent gave no sign of life for {silence:.0f} s")
        elif time.monotonic() >= self._deadline:
            self._lost("the agent did not take the ranks down when it was asked to")
        else:
            return False
        return True

    def stop(self, grace_seconds: float) -> None:
        """Asks every rank to leave (SIGTERM, then SIGKILL); returns at once.

        Called again with a shorter grace, it shortens the first.
        """
        LocalStorage(self.folder.path).write(self.folder.leave.name, str(grace_seconds).encode())
        self._deadline = min(self._deadline, time.monotonic() + grace_seconds + _SLACK_SECONDS)

    def exits(self) -> Mapping[int, int]:
        """Exit status by rank (negative: a signal), the earliest failure first.

        Ranks that ended well may be missing; empty where the agent was lost.
        """
        return Exits.load(self.folder.exits).statuses if self.folder.exits.is_file() else {}

    def _lost(self, message: str) -> None:
        RankError(
            rank=0, time=time.time(), kind="NodeLost", message=message, traceback="", step=0
        ).save(self.folder.agent_error)
