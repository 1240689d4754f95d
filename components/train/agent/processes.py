"""The processes of an attempt: found by what they inherit, ended for good."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

import psutil

MARK = "STEADYTRAIN_ATTEMPT"
"""Variable that whatever an attempt starts inherits, orphans too; its value is the folder.

A forked process has the variables of the program that it was forked from, as far as others can
see. It is known by its output, which goes to the log of a rank or an agent in the folder.
"""
_LOG = re.compile(r".*/(?:rank-\d+\.log|node-\d+/log)")
"""As `attempt.py` names them. Any other file may be where a user's shell writes."""


class Process(Protocol):
    """One that this process has started."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None: ...

    def wait(self) -> object: ...


def end_processes(folder: Path, root: int | None = None) -> None:
    """Kills what belongs to an attempt's folder, or one below it, and the tree of `root`."""
    while remaining := processes_of(folder, root):
        kill(remaining)
        time.sleep(0.02)


def processes_of(folder: Path, root: int | None = None) -> list[psutil.Process]:
    """Live processes of an attempt's folder, or one below it, and the tree of `root`.

    This process itself is never among them.
    """
    real = folder.resolve()
    found = {process for process in psutil.process_iter() if _is_of(process, folder, real)}
    with contextlib.suppress(psutil.NoSuchProcess):
        if root is not None:
            main = psutil.Process(root)
            found.update([main, *main.children(recursive=True)])
    return [process for process in found if alive(process)]


def unreaped(process: Process) -> int | None:
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


def _is_of(process: psutil.Process, folder: Path, real: Path) -> bool:
    if process.pid == os.getpid():
        return False
    output = _output(process)
    forked = _LOG.fullmatch(output) is not None and _below(output, real)
    return forked or _below(_mark(process), folder)


def _below(path: str, folder: Path) -> bool:
    return path != "" and Path(path).is_relative_to(folder)


def _mark(process: psutil.Process) -> str:
    try:
        return process.environ().get(MARK, "")
    except (psutil.Error, OSError):
        return ""


def _output(process: psutil.Process) -> str:
    try:
        return str(Path(f"/proc/{process.pid}/fd/1").readlink())
    except OSError:
        return ""
