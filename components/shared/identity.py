"""Which process on which machine: what a lock and a lease record about their holder.

A process id alone says little: it comes again, and means another process in another
container or on another host that shares the folder.
"""

from __future__ import annotations

import os
import socket
from datetime import UTC, datetime
from pathlib import Path
from typing import Self

import psutil
from pydantic import Field

from steadytrain.components.shared.records import Record


class Identity(Record):
    """A process that holds, or held, something.

    pid: in the PID namespace of `machine`.
    host: its host name, for people.
    machine: boot id and PID namespace; two processes with the same one see the same process ids.
    born: when the process began (see `_born`).
    since: when it took hold, for people.
    """

    pid: int = Field(ge=0, lt=1 << 31)
    host: str
    machine: str
    born: float
    since: str

    @classmethod
    def here(cls) -> Self:
        """This process, from now on."""
        return cls(
            pid=os.getpid(),
            host=socket.gethostname(),
            machine=_machine(),
            born=_born(os.getpid()),
            since=datetime.now(UTC).isoformat(timespec="seconds"),
        )

    def process(self) -> psutil.Process | None:
        """The process, where it is visible from here and still runs."""
        if self.machine != _machine():
            return None
        try:
            process = psutil.Process(self.pid)
            if _born(self.pid) != self.born or process.status() == psutil.STATUS_ZOMBIE:
                return None
        except (psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError):
            return None
        return process

    def alive(self) -> bool | None:
        """Whether the process still runs; None if that cannot be known from here."""
        return None if self.machine != _machine() else self.process() is not None

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} since {self.since}"


def _born(pid: int) -> float:
    """Clock ticks from boot to the start of a process; elsewhere than on Linux, its time.

    Unlike a wall-clock time it is not affected when the clock is set.
    """
    stat = Path(f"/proc/{pid}/stat")
    if not Path("/proc/self/stat").exists():
        return psutil.Process(pid).create_time()
    # The second field is the command's name in parentheses, which may hold spaces and parentheses.
    return float(stat.read_text().rpartition(")")[2].split()[19])


def _machine() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id")
    space = Path("/proc/self/ns/pid")
    if not boot.exists():
        return socket.gethostname()
    return f"{boot.read_text().strip()}/{space.stat().st_ino}"
