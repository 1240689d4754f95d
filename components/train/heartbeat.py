"""Heartbeats between programs that share nothing but storage.

One program writes, and another checks whether the content changes. Only the observer's own clock
counts, so the machines' clocks do not have to agree.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

EVERY_SECONDS = 1.0
STARTING, FINISHING = "start", "finish"
"""The phases before a rank's first step and after its last one."""
_WIDTH = 64


@dataclass(frozen=True)
class Beat:
    """Content of a heartbeat: process ID, beat count, step, and phase."""

    pid: int
    count: int
    step: int
    phase: str

    @classmethod
    def read(cls, path: Path) -> Beat | None:
        """Return the last beat, or None if there is none yet."""
        try:
            pid, count, step, phase = path.read_text().split()
        except (FileNotFoundError, ValueError):
            return None
        return cls(int(pid), int(count), int(step), phase)


class Heartbeat:
    """Writes a process's signs of life to a file, at most once per second.

    The thread that does the work calls `beat`, so the heartbeat stops if that thread hangs.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.count = 0
        self.phase, self.step = "", 0
        self.last = float("-inf")
        self.descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        self.beat(STARTING)

    def beat(self, phase: str, step: int | None = None) -> None:
        """Record progress. A new phase is written immediately."""
        now = self.clock()
        if now - self.last < EVERY_SECONDS and phase == self.phase:
            return
        self.step = self.step if step is None else step
        self.last, self.count, self.phase = now, self.count + 1, phase
        line = f"{os.getpid()} {self.count} {self.step} {self.phase}\n"
        # One small in-place write is never seen half-written, and avoids a rename every second.
        os.pwrite(self.descriptor, line.ljust(_WIDTH).encode(), 0)


class Pulse:
    """Measures how long a value has not changed, by the observer's monotonic clock."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.seen: object = None
        self.since = clock()

    def silence(self, seen: object) -> float:
        """Return the seconds since the value `seen` was first observed."""
        now = self.clock()
        if seen != self.seen:
            self.seen, self.since = seen, now
        return now - self.since
