"""A control group with a memory limit, real, where this machine lets one be made."""

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
    """A control group; version 1 or 2."""

    path: Path

    @property
    def second(self) -> bool:
        return (self.path / "cgroup.controllers").exists()

    def limit(self, size: int) -> None:
        """Bytes that its processes may have together; none of it is swapped out."""
        limit, swap = "memory.limit_in_bytes", "memory.swappiness"
        if self.second:
            limit, swap = "memory.max", "memory.swap.max"
        (self.path / limit).write_text(str(size))
        # Where nothing is ever swapped out there is nothing to forbid.
        with contextlib.suppress(OSError):
            (self.path / swap).write_text("0")

    @property
    def peak(self) -> int:
        """Bytes that its processes had at most."""
        name = "memory.peak" if self.second else "memory.max_usage_in_bytes"
        return int((self.path / name).read_text())

    @property
    def anonymous(self) -> int:
        """Bytes that its processes have now and that are in no file."""
        name = "anon" if self.second else "rss"
        found = re.search(rf"^{name} (\d+)$", (self.path / "memory.stat").read_text(), re.MULTILINE)
        assert found
        return int(found[1])

    def inside(self, command: list[str]) -> list[str]:
        """A command that runs, and starts all else, in the group."""
        enter = f'echo $$ > {self.path}/cgroup.procs && exec "$@"'
        return ["sh", "-c", enter, "sh", *command]


@contextlib.contextmanager
def limited_group() -> Iterator[Group]:
    """A new group below this process's own; the test is skipped where none can be made."""
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
    """Where groups of the memory controller are made: this process's own, or the mount."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            return _first_folder(_MOUNT / "memory" / path.strip("/"), _MOUNT / "memory")
        if not controllers and (_MOUNT / "cgroup.controllers").exists():
            return _first_folder(_MOUNT / path.strip("/"), _MOUNT)
    raise FileNotFoundError("no memory controller")


def _first_folder(*places: Path) -> Path:
    return next(place for place in places if place.is_dir())
