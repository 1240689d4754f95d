"""This machine's memory: how much there is, and whether it ran out."""

from __future__ import annotations

import os
import re
from pathlib import Path

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
            found = re.search(r"^oom_kill (\d+)$", path.read_text(), re.MULTILINE)
            if found:
                return int(found[1])
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
    return [place / name for place in places for name in names]
