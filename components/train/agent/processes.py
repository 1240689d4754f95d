"""Find the processes of an attempt by what they inherit, and end all of them."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Protocol

import psutil

from steadytrain.components.shared.errors import Unkillable
from steadytrain.components.shared.quantities import duration

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
        found = {item for item in processes_of(folder, root) if item.pid not in spared}
        now = time.monotonic()
        # An ending process no longer shows what it belongs to.
        killed = {item: killed.get(item, now) for item in found | killed.keys() if alive(item)}
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
    found, place = "", Path(f"/proc/{process.pid}")
    with contextlib.suppress(OSError):
        lines = (place / "stack").read_text().splitlines()
        if calls := [line.split()[-1].partition("+")[0] for line in lines if line.strip()]:
            found += f" (called by {', '.join(calls[1:])})" if len(calls) > 1 else ""
    with contextlib.suppress(OSError):
        opened = {str(path.readlink()) for path in (place / "fd").iterdir()}
        if devices := sorted(path for path in opened if _DEVICE.match(path)):
            found += f", which holds {', '.join(devices)}"
    return found


def processes_of(folder: Path, root: int | None = None) -> list[psutil.Process]:
    """Return the live processes of a folder or of one inside it, and the tree of `root`.

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
