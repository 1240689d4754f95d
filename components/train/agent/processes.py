"""Find the processes of an attempt by what they inherit, end all of them, and get their stacks.

A signal that is handled in C writes the stacks of a rank's threads. Even a rank whose interpreter
is blocked in a call that never returns can answer.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import re
import signal
import socket
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Protocol

import psutil

from steadytrain.components.shared.errors import Unkillable
from steadytrain.components.shared.periodic import Pulse
from steadytrain.components.shared.quantities import duration
from steadytrain.components.train.attempt import AttemptFolder

KILL_SECONDS = 30.0
"""How long a killed process may take to end: the kernel first frees its memory and devices."""

MARK = "STEADYTRAIN_ATTEMPT"
"""Environment variable that all of an attempt's processes inherit, including orphans.

Its value is the folder. Seen from outside, a forked process keeps the environment of the program it
was forked from. It is recognized by its output, which goes to the log of a rank or an agent in the
folder.
"""
_LOG = re.compile(r".*/(?:rank-\d+\.log|node-\d+/log)")
"""Log names, as in `attempt.py`. Any other file may be the output of a user's own shell."""
_DEVICE = re.compile(r"/dev/(?:nvidia\d|kfd|dri/)")


class Process(Protocol):
    """A process that this process started."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None: ...

    def wait(self) -> object: ...


def end_processes(folder: Path, root: int | None = None, *, spared: Collection[int] = ()) -> None:
    """Kill all processes of an attempt's folder or of a folder inside it, and the tree of `root`.

    Args:
        spared: IDs of processes to leave alone.

    Raises:
        Unkillable: a process has not ended KILL_SECONDS after SIGKILL. It waits in the kernel, for
            example for a file server or a GPU's driver.
    """
    killed: dict[psutil.Process, float] = {}
    while True:
        remaining = {item for item in processes_of(folder, root) if item.pid not in spared}
        now = time.monotonic()
        # An ending process no longer shows what it belongs to.
        killed = {item: killed.get(item, now) for item in remaining | killed.keys() if alive(item)}
        if not killed:
            return
        kill(killed)
        if stuck := [item for item, since in killed.items() if now - since > KILL_SECONDS]:
            raise _unkillable(stuck)
        time.sleep(0.02)


def _unkillable(processes: Collection[psutil.Process]) -> Unkillable:
    return Unkillable(
        f"still running {duration(KILL_SECONDS)} after SIGKILL: "
        + "; ".join(f"process {item.pid}, {state(item)}{_details(item)}" for item in processes),
        remedy="bring back what it waits for (a file server, a GPU's driver) or restart the "
        "machine; then start the run again: it continues from the newest checkpoint",
        pids=[item.pid for item in processes],
    )


def state(process: psutil.Process) -> str:
    """Return what a process is doing, according to the kernel: its state and wait channel."""
    try:
        waits = Path(f"/proc/{process.pid}/wchan").read_text().strip("0\n")
        status = str(process.status())
    except (OSError, psutil.NoSuchProcess):
        return "gone"
    return f"{status} in {waits}" if waits else status


def _details(process: psutil.Process) -> str:
    """Return a process's stack in the kernel and its devices, as far as we may read them."""
    result, proc = "", Path(f"/proc/{process.pid}")
    with contextlib.suppress(OSError):
        lines = (proc / "stack").read_text().splitlines()
        if calls := [line.split()[-1].partition("+")[0] for line in lines if line.strip()]:
            result += f" (called by {', '.join(calls[1:])})" if len(calls) > 1 else ""
    with contextlib.suppress(OSError):
        opened = {str(path.readlink()) for path in (proc / "fd").iterdir()}
        if devices := sorted(path for path in opened if _DEVICE.match(path)):
            result += f", which holds {', '.join(devices)}"
    return result


def processes_of(folder: Path, root: int | None = None) -> list[psutil.Process]:
    """Return the live processes of a folder or of one inside it, and the tree of `root`.

    This process itself is never among them.
    """
    real = folder.resolve()
    processes = {process for process in psutil.process_iter() if _is_of(process, folder, real)}
    with contextlib.suppress(psutil.NoSuchProcess):
        if root is not None:
            main = psutil.Process(root)
            processes.update([main, *main.children(recursive=True)])
    return [process for process in processes if alive(process)]


@contextlib.contextmanager
def reserved_port() -> Iterator[tuple[str, int]]:
    """Yield an address and a port of this machine that no other process gets meanwhile.

    A process may still listen there, because this socket does not, and both allow it.
    """
    with socket.socket() as reserving:
        reserving.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserving.bind(("127.0.0.1", 0))
        host, port = reserving.getsockname()
        yield host, port


def memory_of(root: int, enough: float = 0.0) -> int:
    """Return the bytes that a process and its descendants take, each shared page in parts.

    Return 0 if it has ended.

    Args:
        enough: if they take no more with every shared page in full, return that: the kernel knows
            it, and for the parts it has to walk through all pages.
    """
    total = whole = 0
    with contextlib.suppress(psutil.Error):
        first = psutil.Process(root)
        processes = [first, *first.children(recursive=True)]
        for process in processes:
            with contextlib.suppress(psutil.Error):
                whole += process.memory_info().rss
        if whole <= enough:
            return whole
        for process in processes:
            with contextlib.suppress(psutil.Error):
                total += process.memory_full_info().pss
    return total


def unreaped(process: Process) -> int | None:
    """Return a child's process ID while no other process can have it; None once it was reaped."""
    return process.pid if process.poll() is None else None


def kill(processes: Iterable[psutil.Process]) -> None:
    """Send SIGKILL to each process. Skip those that have ended."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def alive(process: psutil.Process) -> bool:
    """Return whether a process is still running. A zombie is not."""
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


_log = logging.getLogger(__name__)
_SIGNAL = signal.SIGUSR2
_WAIT_SECONDS = 5.0
_QUIET_SECONDS = 0.3
_STOPPED = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)


def answer_to_signal(path: Path) -> None:
    """Append the stacks of all threads to a file whenever the signal arrives.

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
        written = path.stat().st_size
    except OSError:
        return True
    return pulse.silence(written) > _QUIET_SECONDS and written > size
