"""Stacks of a rank's threads, requested by a signal that is handled in C.

Even a rank whose interpreter is blocked in a call that never returns can answer.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path

import psutil

from steadytrain.components.train.attempt import AttemptFolder

_SIGNAL = signal.SIGUSR2
_WAIT_SECONDS = 5.0
_QUIET_SECONDS = 0.3
_STOPPED = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)


def answer_to_signal(path: Path) -> None:
    """From now on, append the stacks of all threads to a file when the signal arrives."""
    # Unbuffered and never closed: the handler writes directly to the descriptor.
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    faulthandler.register(_SIGNAL, file=descriptor, all_threads=True)


def save_stacks(folder: AttemptFolder, processes: Mapping[int, psutil.Process]) -> None:
    """Make ranks write their stacks, and wait a few seconds for them.

    A stopped process is resumed, since it cannot answer otherwise. End it afterwards.

    Args:
        processes: processes that handle the signal, by rank.
    """
    sizes = {}
    for rank, process in processes.items():
        with contextlib.suppress(psutil.NoSuchProcess):
            path = folder.stacks(rank)
            with path.open("a") as handle:
                handle.write(f"rank {rank}, process {process.pid}: {state(process)}\n")
            sizes[path] = path.stat().st_size
            process.send_signal(_SIGNAL)
            if process.status() in _STOPPED:
                process.resume()
    end = time.monotonic() + _WAIT_SECONDS
    while time.monotonic() < end and any(not _written(path, size) for path, size in sizes.items()):
        time.sleep(0.05)


def state(process: psutil.Process) -> str:
    """Return what a process is doing, according to the kernel."""
    try:
        waits = Path(f"/proc/{process.pid}/wchan").read_text().strip("0\n")
        status = str(process.status())
    except (OSError, psutil.NoSuchProcess):
        return "gone"
    return f"{status} in {waits}" if waits else status


def is_stopped(process: psutil.Process) -> bool:
    """Return whether a process is stopped, by SIGSTOP or a debugger."""
    try:
        return process.status() in _STOPPED
    except psutil.NoSuchProcess:
        return False


def _written(path: Path, size: int) -> bool:
    """Return whether a file has grown beyond `size` and is no longer changing."""
    found = path.stat()
    return found.st_size > size and time.time() - found.st_mtime > _QUIET_SECONDS
