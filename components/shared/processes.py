"""Identify a process on a machine, and set the title that `ps` and `top` show."""

from __future__ import annotations

import contextlib
import os
import socket
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import Self

import psutil
from pydantic import Field

from steadytrain.components.shared.records import Record


class Identity(Record):
    """A process that holds or held something.

    pid: in the PID namespace of `machine`.
    host: host name, for people.
    machine: boot id and PID namespace. Two processes with the same value see the same process ids.
    born: when the process started (see `_born`).
    since: when it took the lock or lease, for people.
    """

    pid: int = Field(ge=0, lt=1 << 31)
    host: str
    machine: str
    born: float
    since: str

    @classmethod
    def here(cls) -> Self:
        """Return the identity of this process, with `since` set to now."""
        return cls(
            pid=os.getpid(),
            host=socket.gethostname(),
            machine=_machine(),
            born=_born(os.getpid()),
            since=datetime.now(UTC).isoformat(timespec="seconds"),
        )

    def process(self) -> psutil.Process | None:
        """Return the process if it is visible from here and still runs."""
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
        """Return whether the process still runs; None if that cannot be known from here."""
        return None if self.machine != _machine() else self.process() is not None

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} since {self.since}"


def _born(pid: int) -> float:
    """Return the clock ticks from boot to a process's start; without /proc, its start time.

    Unlike wall-clock time, ticks do not change when the clock is set.
    """
    stat = Path(f"/proc/{pid}/stat")
    if not Path("/proc/self/stat").exists():
        return psutil.Process(pid).create_time()
    # The second field is the command name in parentheses, which may contain spaces and parentheses.
    return float(stat.read_text().rpartition(")")[2].split()[19])


def _machine() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id")
    space = Path("/proc/self/ns/pid")
    if not boot.exists():
        return socket.gethostname()
    return f"{boot.read_text().strip()}/{space.stat().st_ino}"


def set_title(title: str) -> None:
    """Show this process as "steadytrain: TITLE", cut to the length of its command line."""
    # The library would use the space of the environment too, by which processes are found.
    os.environ["SPT_NOENV"] = "1"
    # It only helps who reads the list: an older environment without the library works.
    with contextlib.suppress(ModuleNotFoundError):
        import_module("setproctitle").setproctitle(f"steadytrain: {title}")
