"""Heartbeats between programs that share nothing but storage.

One program writes, and another checks whether the content changes. Only the observer's own clock
counts, so the machines' clocks do not have to agree.

Storage that fails for a while ends neither of them. A beat that cannot be written is left out, and
an observer that cannot read does not count the time. Beats that stay out look like a process that
is gone: without storage, nothing proves that it may go on (see the lease).
"""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from steadytrain.components.shared.config import RecoveryConfig
from steadytrain.components.shared.storage.local import open_regular

EVERY_SECONDS = 1.0
STARTING, FINISHING = "start", "finish"
"""The phases before a rank's first step and after its last one."""
_WIDTH = 64
_WRITE: Final = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK
"""Opening a pipe fails at once instead of waiting for its reader."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Beat:
    """Content of a heartbeat: process ID, beat count, step, and phase."""

    pid: int
    count: int
    step: int
    phase: str

    @classmethod
    def read(cls, path: Path) -> Beat | None:
        """Return the last beat, or None if there is none: no file, or something else in its place.

        Raises:
            OSError: it cannot be read now.
        """
        try:
            with open_regular(path) as file:
                pid, count, step, phase = file.read(_WIDTH).decode().split()
            return cls(int(pid), int(count), int(step), phase)
        except (FileNotFoundError, IsADirectoryError, ValueError):
            return None
        except OSError as error:
            if error.errno == errno.ENXIO:
                return None
            raise


class Heartbeat:
    """Writes a process's signs of life to a file, at most once per second.

    The thread that does the work calls `beat`, so the heartbeat stops if that thread hangs.

    Attributes:
        refusal: why the last beat could not be written; "" if it was.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.count = 0
        self.phase, self.step = "", 0
        self.last = float("-inf")
        self.path, self.refusal = path, ""
        self._descriptor: int | None = None
        self.beat(STARTING)

    def beat(self, phase: str, step: int | None = None) -> None:
        """Record progress. A new phase is written immediately."""
        now = self.clock()
        if now - self.last < EVERY_SECONDS and phase == self.phase:
            return
        self.step = self.step if step is None else step
        self.last, self.count, self.phase = now, self.count + 1, phase
        line = f"{os.getpid()} {self.count} {self.step} {self.phase}\n"
        try:
            self._write(line.ljust(_WIDTH).encode())
        except OSError as error:
            self._report(error.strerror or repr(error))
        else:
            self._report("")

    def close(self) -> None:
        """Close the file. A later beat opens it again."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _write(self, line: bytes) -> None:
        if self._descriptor is None:
            self._descriptor = os.open(self.path, _WRITE, 0o644)
        try:
            # One small in-place write is never seen half-written, and avoids a rename every second.
            os.pwrite(self._descriptor, line, 0)
        except OSError:
            # A stale handle never works again.
            self.close()
            raise

    def _report(self, refusal: str) -> None:
        """Report a change, once. Logging does not fail on the same storage."""
        if refusal != self.refusal:
            found = (
                f"cannot be written: {refusal}; it tries again" if refusal else "is written again"
            )
            _log.warning("the heartbeat %s %s", self.path, found)
        self.refusal = refusal


OTHER_RANKS_SECONDS: Final = 900.0
"""How long a rank that waits for the others' parts of a save shows signs of life."""
_SLACK_SECONDS: Final = 300.0
"""Time to find a hang, to save the stacks, and to end the ranks."""


def longest_wait(recovery: RecoveryConfig) -> float:
    """Return the seconds after which a collective may fail by itself.

    A rank that does not come is found before that by its heartbeat, and reported with its stacks.
    """
    limit = max(recovery.start_timeout_seconds, recovery.hang_timeout_seconds)
    return OTHER_RANKS_SECONDS + limit + _SLACK_SECONDS
