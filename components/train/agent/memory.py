"""Whether the kernel killed something here because memory ran out."""

from __future__ import annotations

import re
from pathlib import Path

_MOUNT = Path("/sys/fs/cgroup")


def oom_kills(mount: Path = _MOUNT, membership: Path = Path("/proc/self/cgroup")) -> int:
    """Processes of this control group that the kernel has killed so far for want of memory.

    0 where there is no control group that counts them (version 2, or 1 since Linux 4.13).
    """
    for path in _counters(mount, membership):
        if path.is_file():
            found = re.search(r"^oom_kill (\d+)$", path.read_text(), re.MULTILINE)
            if found:
                return int(found[1])
    return 0


def _counters(mount: Path, membership: Path) -> list[Path]:
    """Where the count may be; a container sees its own group as the root of the mount."""
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
    return [place / name for place in places for name in ("memory.oom_control", "memory.events")]
