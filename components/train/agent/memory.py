"""This machine's memory: what there is of it, and whether it has run out."""

from __future__ import annotations

import os
import re
from pathlib import Path

_MOUNT = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")
_LIMITS = ("memory.limit_in_bytes", "memory.max")
_COUNTERS = ("memory.oom_control", "memory.events")


def host_memory(mount: Path = _MOUNT, membership: Path = _MEMBERSHIP) -> int:
    """Bytes that processes here may have: the machine's, or what their control group may."""
    files = _files(_LIMITS, mount, membership)
    limits = [path.read_text().strip() for path in files if path.is_file()]
    all_of_it = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    # Without a limit version 2 says "max", and version 1 a very large number.
    return min([all_of_it, *(int(limit) for limit in limits if limit.isdecimal())])


def oom_kills(mount: Path = _MOUNT, membership: Path = _MEMBERSHIP) -> int:
    """Processes of this control group that the kernel has killed so far for want of memory.

    0 where there is no control group that counts them (version 2, or 1 since Linux 4.13).
    """
    for path in _files(_COUNTERS, mount, membership):
        if path.is_file():
            found = re.search(r"^oom_kill (\d+)$", path.read_text(), re.MULTILINE)
            if found:
                return int(found[1])
    return 0


def _files(names: tuple[str, ...], mount: Path, membership: Path) -> list[Path]:
    """Where these may be; a container sees its own group as the root of the mount."""
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
    return [place / name for place in places for name in names]
