"""The processes of an attempt: found by a mark that they inherit, ended for good."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path

import psutil

MARK = "STEADYTRAIN_ATTEMPT"
"""Variable that every process of an attempt inherits, orphans too; its value is the folder."""


def end_processes(folder: Path, root: int | None = None) -> None:
    """Kills what is marked with an attempt's folder, or one below it, and the tree of `root`."""
    while remaining := processes_of(folder, root):
        kill(remaining)
        time.sleep(0.02)


def processes_of(folder: Path, root: int | None = None) -> list[psutil.Process]:
    """Live processes marked with an attempt's folder, or one below it, and the tree of `root`.

    This process itself is never among them.
    """
    found = {process for process in psutil.process_iter() if _is_of(process, folder)}
    with contextlib.suppress(psutil.NoSuchProcess):
        if root is not None:
            main = psutil.Process(root)
            found.update([main, *main.children(recursive=True)])
    return [process for process in found if alive(process)]


def unreaped(process: subprocess.Popen[bytes]) -> int | None:
    """A child's process id while it cannot be another's; None once it has been waited for."""
    return process.pid if process.poll() is None else None


def kill(processes: Iterable[psutil.Process]) -> None:
    """SIGKILL to each; those that are gone are passed over."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def alive(process: psutil.Process) -> bool:
    """Whether a process still runs; one that only waits to be reaped does not."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _is_of(process: psutil.Process, folder: Path) -> bool:
    try:
        mark = process.environ().get(MARK, "")
    except (psutil.Error, OSError):
        return False
    return mark != "" and process.pid != os.getpid() and Path(mark).is_relative_to(folder)
