"""Use heartbeats to find ranks that make no progress, and report them with their stacks."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, replace

import psutil

from steadytrain.components.shared.config import RecoveryConfig
from steadytrain.components.shared.errors import StorageError
from steadytrain.components.shared.periodic import Pulse
from steadytrain.components.shared.quantities import duration
from steadytrain.components.train.agent.processes import alive, is_stopped, save_stacks, state
from steadytrain.components.train.agent.ranks import NodeShare
from steadytrain.components.train.attempt import (
    FINISHING,
    MEETING,
    STARTING,
    AttemptFolder,
    Beat,
    RankError,
)

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RankState:
    """State of a rank.

    beat: its last heartbeat; None before the first one.
    silence: seconds since the last sign of progress.
    limit: seconds of silence after which the rank counts as hung.
    process: None if the rank has not started, or has ended.
    """

    beat: Beat | None
    silence: float
    limit: float
    process: psutil.Process | None

    @property
    def hangs(self) -> bool:
        return self.silence > self.limit

    def __str__(self) -> str:
        if self.beat is None or self.process is None:
            return f"silent for {duration(self.silence)}, not started"
        doing = f"{self.beat.phase}, step {self.beat.step}"
        return f"silent for {duration(self.silence)} ({doing}, {state(self.process)})"


class HangWatch:
    """Watches the heartbeats of this node's ranks."""

    def __init__(self, folder: AttemptFolder, share: NodeShare, recovery: RecoveryConfig) -> None:
        self.folder, self.share, self.recovery = folder, share, recovery
        self.pulses = {rank: Pulse() for rank in share.ranks}
        self.beats = dict[int, Beat | None]()

    def excuse(self) -> None:
        """Start over with each rank: none could have written a beat."""
        for pulse in self.pulses.values():
            pulse.excuse()

    def look(self) -> bool:
        """Return whether a rank hangs. If so, write stacks and an error report to the folder."""
        beats = {rank: self._beat(rank, pulse) for rank, pulse in self.pulses.items()}
        # If all ranks wait for each other, none will come, although each shows signs of life. Ranks
        # on other nodes are unknown here.
        lost = self.share.nodes == 1 and all(
            beat is not None and beat.phase == MEETING for beat in beats.values()
        )
        states = {
            rank: self._state_of(beat, self.pulses[rank], lost) for rank, beat in beats.items()
        }
        if not any(rank_state.hangs for rank_state in states.values()):
            return False
        self._report(states)
        return True

    def _state_of(self, beat: Beat | None, pulse: Pulse, lost: bool) -> RankState:
        recovery = self.recovery
        process = _process(beat) if beat else None
        if beat is not None and process is None:
            return RankState(beat, 0.0, recovery.hang_timeout_seconds, None)  # the rank has ended
        stepping = beat is not None and beat.phase not in (STARTING, FINISHING)
        limit = recovery.hang_timeout_seconds if stepping else recovery.start_timeout_seconds
        seen = replace(beat, count=0) if beat is not None and lost else beat
        return RankState(beat, pulse.silence(seen), limit, process)

    def _beat(self, rank: int, pulse: Pulse) -> Beat | None:
        """Return the rank's last beat; the last known one if it cannot be read now."""
        try:
            self.beats[rank] = Beat.read(self.folder.heartbeat(rank))
        except OSError:
            pulse.excuse()
        return self.beats.get(rank)

    def _report(self, states: dict[int, RankState]) -> None:
        """Report a stopped rank, or else the longest silent one; the others only wait for it."""
        silences = "; ".join(f"rank {rank} {rank_state}" for rank, rank_state in states.items())
        rank = max(states, key=lambda rank: _guilt(states[rank]))
        processes = {
            rank: rank_state.process for rank, rank_state in states.items() if rank_state.process
        }
        now = time.time()
        save_stacks(self.folder, processes)
        hang = RankError(
            rank=rank,
            time=now,
            kind="Hang",
            message=f"no progress for longer than {duration(states[rank].limit)}: {silences}; "
            f"stacks: {self.folder.stacks(rank)}",
            step=max((item.beat.step for item in states.values() if item.beat), default=0),
            still_since=now - states[rank].silence,
        )
        try:
            hang.save(self.folder.node(self.share.node).error)
        except StorageError as error:
            _log.warning("%s; not reported: %s", hang.message, error.message)


def _guilt(rank_state: RankState) -> tuple[bool, float]:
    stopped = rank_state.process is not None and is_stopped(rank_state.process)
    return stopped, rank_state.silence


def _process(beat: Beat) -> psutil.Process | None:
    try:
        process = psutil.Process(beat.pid)
    except psutil.NoSuchProcess:
        return None
    return process if alive(process) else None
