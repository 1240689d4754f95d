"""Another process that holds something: a lock, a lease, a run."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def holding(code: str, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    """Run a program, and begin the block when it has printed "held". Kill it after the block."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, **pipes)
    try:
        assert process.stdout.readline() == "held\n"
        yield process
    finally:
        process.kill()
        process.communicate()
