"""A real control group with a memory limit, if this machine allows creating one."""

from __future__ import annotations

import contextlib
import re
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

_MOUNT = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Group:
    """A control group, version 1 or 2."""

    path: Path

    @property
    def second(self) -> bool:
        return (self.path / "cgroup.controllers").exists()

    def limit(self, size: int) -> None:
        """Limit the total memory of its processes to `size` bytes, without swap."""
        limit, swap = "memory.limit_in_bytes", "memory.swappiness"
        if self.second:
            limit, swap = "memory.max", "memory.swap.max"
        (self.path / limit).write_text(str(size))
        # Fails on a machine without swap, where there is nothing to limit.
        with contextlib.suppress(OSError):
            (self.path / swap).write_text("0")

    @property
    def peak(self) -> int:
        """The peak memory of its processes in bytes."""
        name = "memory.peak" if self.second else "memory.max_usage_in_bytes"
        return int((self.path / name).read_text())

    @property
    def anonymous(self) -> int:
        """The current anonymous memory of its processes in bytes."""
        name = "anon" if self.second else "rss"
        found = re.search(rf"^{name} (\d+)$", (self.path / "memory.stat").read_text(), re.MULTILINE)
        assert found
        return int(found[1])

    def add(self, pid: int) -> None:
        """Move a process into the group, and with it what it starts from now on."""
        (self.path / "cgroup.procs").write_text(str(pid))

    def inside(self, command: list[str]) -> list[str]:
        """Return a command line that runs the command and its children in the group."""
        enter = f'echo $$ > {self.path}/cgroup.procs && exec "$@"'
        return ["sh", "-c", enter, "sh", *command]


@contextlib.contextmanager
def limited_group() -> Iterator[Group]:
    """Yield a new group below this process's own; skip the test if none can be created."""
    try:
        group = Group(_own() / f"test-{uuid.uuid4().hex[:8]}")
        group.path.mkdir()
    except OSError as error:
        pytest.skip(f"no control group with a memory limit can be made here: {error}")
    try:
        if not any(group.path.glob("memory.max")) and not any(group.path.glob("*.limit_in_bytes")):
            pytest.skip(f"{group.path} has no memory limit: its parent does not hand it down")
        yield group
    finally:
        group.path.rmdir()


def _own() -> Path:
    """Return where to create memory groups: this process's own group, or the mount."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            return _first_folder(_MOUNT / "memory" / path.strip("/"), _MOUNT / "memory")
        if not controllers and (_MOUNT / "cgroup.controllers").exists():
            return _first_folder(_MOUNT / path.strip("/"), _MOUNT)
    raise FileNotFoundError("no memory controller")


def _first_folder(*places: Path) -> Path:
    return next(place for place in places if place.is_dir())
