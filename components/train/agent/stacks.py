"""Stacks of a rank's threads, requested by a signal that is handled in C.

Even a rank whose interpreter is blocked in a call that never returns can answer.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path

import psutil

from steadytrain.components.shared.periodic import Pulse
from steadytrain.components.train.agent.processes import state
from steadytrain.components.train.attempt import AttemptFolder

_log = logging.getLogger(__name__)
_SIGNAL = signal.SIGUSR2
_WAIT_SECONDS = 5.0
_QUIET_SECONDS = 0.3
_STOPPED = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)


def answer_to_signal(path: Path) -> None:
    """From now on, append the stacks of all threads to a file when the signal arrives.

    If storage refuses the file, they go to the standard error instead.
    """
    try:
        # Unbuffered and never closed: the handler writes directly to the descriptor.
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    except OSError as error:
        _log.warning("%s cannot be written: %s; stacks go to the log", path, error.strerror)
        descriptor = 2
    faulthandler.register(_SIGNAL, file=descriptor, all_threads=True)


def save_stacks(folder: AttemptFolder, processes: Mapping[int, psutil.Process]) -> None:
    """Make ranks write their stacks, and wait a few seconds for them.

    A stopped process is resumed, since it cannot answer otherwise. End it afterwards.

    Args:
        processes: processes that handle the signal, by rank.
    """
    sizes = {}
    for rank, process in processes.items():
        path = folder.stacks(rank)
        with contextlib.suppress(psutil.NoSuchProcess):
            with contextlib.suppress(OSError), path.open("a") as handle:
                handle.write(f"rank {rank}, process {process.pid}: {state(process)}\n")
                handle.flush()
                sizes[path] = path.stat().st_size
            process.send_signal(_SIGNAL)
            if process.status() in _STOPPED:
                process.resume()
    end = time.monotonic() + _WAIT_SECONDS
    pulses = {path: Pulse() for path in sizes}
    while time.monotonic() < end and not all(
        _written(path, sizes[path], pulse) for path, pulse in pulses.items()
    ):
        time.sleep(0.05)


def is_stopped(process: psutil.Process) -> bool:
    """Return whether a process is stopped, by SIGSTOP or a debugger."""
    try:
        return process.status() in _STOPPED
    except psutil.NoSuchProcess:
        return False


def _written(path: Path, size: int, pulse: Pulse) -> bool:
    """Return whether a file has grown beyond `size` and no longer grows, or cannot be read."""
    try:
        found = path.stat().st_size
    except OSError:
        return True
    return pulse.silence(found) > _QUIET_SECONDS and found > size
