"""Where the threads of a rank stand: asked by a signal that is answered in C.

So the answer comes even from a rank whose interpreter is held by a call that
does not return.
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
    """From now on this process adds the stacks of all its threads to a file when it is asked."""
    # Without a buffer and never closed: the handler writes to the descriptor.
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    faulthandler.register(_SIGNAL, file=descriptor, all_threads=True)


def save_stacks(folder: AttemptFolder, processes: Mapping[int, psutil.Process]) -> None:
    """Has ranks write their stacks, and waits for them a few seconds.

    A stopped process is let go on, since it can answer only then: end it afterwards.

    Args:
        processes: by rank, those that answer to the signal.
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
    """What the kernel says that a process does."""
    try:
        waits = Path(f"/proc/{process.pid}/wchan").read_text().strip("0\n")
        status = str(process.status())
    except (OSError, psutil.NoSuchProcess):
        return "gone"
    return f"{status} in {waits}" if waits else status


def is_stopped(process: psutil.Process) -> bool:
    """Whether a process was stopped, by SIGSTOP or a debugger."""
    try:
        return process.status() in _STOPPED
    except psutil.NoSuchProcess:
        return False


def _written(path: Path, size: int) -> bool:
    """Whether a file has grown beyond a size and then come to rest."""
    found = path.stat()
    return found.st_size > size and time.time() - found.st_mtime > _QUIET_SECONDS
