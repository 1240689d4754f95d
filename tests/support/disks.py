"""Small file systems, which fill up."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def small_file_system(place: Path, options: str) -> Iterator[Path]:
    """Mount a file system in memory, with mount's options for tmpfs; yield its folder."""
    place.mkdir(exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("no file system can be mounted here")
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


def fill(place: Path) -> None:
    """Write to files in a folder until not even a few bytes fit any more."""
    for size in (1 << 20, 512):
        with (
            contextlib.suppress(OSError),
            (place / f"filler-{size}").open("wb", buffering=0) as filler,
        ):
            while filler.write(b"x" * size):
                pass


def free(place: Path) -> None:
    """Remove what `fill` wrote."""
    for path in place.glob("filler-*"):
        path.unlink()
