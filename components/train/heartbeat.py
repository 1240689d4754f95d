"""Signs of life between programs that share nothing but storage.

One writes, another looks whether what was written changes. Only the observer's
own clock counts, so no two machines need the same time.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

EVERY_SECONDS = 1.0
STARTING, FINISHING = "start", "finish"
"""The phases before a rank has done its first step, and after its last one."""
_WIDTH = 64


@dataclass(frozen=True)
class Beat:
    """What a heartbeat says: which process, how often before, at which step, doing what."""

    pid: int
    count: int
    step: int
    phase: str

    @classmethod
    def read(cls, path: Path) -> Beat | None:
        """The last beat, or None where there is none yet."""
        try:
            pid, count, step, phase = path.read_text().split()
        except (FileNotFoundError, ValueError):
            return None
        return cls(int(pid), int(count), int(step), phase)


class Heartbeat:
    """Writes a process's signs of life to a file, at most once a second.

    Called by the thread that does the work, so that a thread that stands still falls silent.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.count = 0
        self.phase, self.step = "", 0
        self.last = float("-inf")
        self.descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        self.beat(STARTING)

    def beat(self, phase: str, step: int | None = None) -> None:
        """Notes progress; a new phase is written at once."""
        now = self.clock()
        if now - self.last < EVERY_SECONDS and phase == self.phase:
            return
        self.step = self.step if step is None else step
        self.last, self.count, self.phase = now, self.count + 1, phase
        line = f"{os.getpid()} {self.count} {self.step} {self.phase}\n"
        # One small write in place: whole, and without a rename each second.
        os.pwrite(self.descriptor, line.ljust(_WIDTH).encode(), 0)


class Pulse:
    """How long something has not changed, by the observer's monotonic clock."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.seen: object = None
        self.since = clock()

    def silence(self, seen: object) -> float:
        """Seconds since what is seen now was seen first."""
        now = self.clock()
        if seen != self.seen:
            self.seen, self.since = seen, now
        return now - self.since
