"""Identify a process on a machine, and set the title that `ps` and `top` show.

Also tell how much memory the machine has, and whether it ran out.
"""

from __future__ import annotations

import contextlib
import os
import re
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


_MOUNT = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")
_LIMITS = ("memory.limit_in_bytes", "memory.max")
_COUNTERS = ("memory.oom_control", "memory.events")


def host_memory(mount: Path = _MOUNT, membership: Path = _MEMBERSHIP) -> int:
    """Return the bytes available to processes here: all memory, or the cgroup's lower limit."""
    files = _files(_LIMITS, mount, membership)
    limits = [path.read_text().strip() for path in files if path.is_file()]
    all_of_it = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    # Without a limit, cgroup v2 has "max", and v1 has a very large number.
    return min([all_of_it, *(int(limit) for limit in limits if limit.isdecimal())])


def oom_kills(mount: Path = _MOUNT, membership: Path = _MEMBERSHIP) -> int:
    """Return how many processes of this cgroup the kernel's OOM killer has killed so far.

    Return 0 if no cgroup counts them. cgroup v2 does, and v1 does since Linux 4.13.
    """
    for path in _files(_COUNTERS, mount, membership):
        if path.is_file():
            match = re.search(r"^oom_kill (\d+)$", path.read_text(), re.MULTILINE)
            if match:
                return int(match[1])
    return 0


def _files(names: tuple[str, ...], mount: Path, membership: Path) -> list[Path]:
    """Return where these files may be. A container sees its own cgroup as the mount's root."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return []
    places = []
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if "memory" in controllers.split(","):
            places += [mount / "memory" / group.strip("/"), mount / "memory"]
        elif not controllers:
            places += [mount / group.strip("/"), mount]
    return [folder / name for folder in places for name in names]
