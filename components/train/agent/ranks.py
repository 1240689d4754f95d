"""The ranks on this node: plain Python for one, torchrun for several."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import psutil

from steadytrain.components.train.agent.processes import alive, end_processes, kill, unreaped
from steadytrain.components.train.attempt import AttemptFolder

OUTLIVE_SECONDS = 8.0
"""Time for the other ranks to follow one that is down; torchrun alone would wait for 30 s."""

# A program that is itself a rank of something must not pass that on.
_OTHERS_RANK = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
)
_AGENT = "steadytrain.components.train.agent"


class Ranks:
    """The processes of the ranks.

    Args:
        process: the rank itself, or torchrun where there are several.
    """

    def __init__(self, process: subprocess.Popen[bytes], folder: AttemptFolder, count: int) -> None:
        self.process, self.folder, self.count = process, folder, count
        self._deadline = self._others_deadline = float("inf")
        self._all: list[psutil.Process] = []

    def down(self) -> bool:
        """Whether all are down; those that outstay their time are killed here."""
        if time.monotonic() >= self._deadline:
            self.kill()
        elif self.count > 1:
            self._end_stragglers()
        return self.process.poll() is not None

    def leave(self, grace_seconds: float) -> None:
        """Asks every rank to leave; returns at once. Again with a shorter grace, it shortens it."""
        self._deadline = min(self._deadline, time.monotonic() + grace_seconds)
        for rank in self._present():
            with contextlib.suppress(psutil.NoSuchProcess):
                rank.send_signal(signal.SIGTERM)

    def exits(self) -> Mapping[int, int]:
        """Exit status by rank (negative: a signal), the earliest failure first."""
        if self.count == 1:
            return {0: self.process.returncode}
        try:
            content = json.loads(_torchrun_exits(self.folder).read_bytes())
        except FileNotFoundError:
            # torchrun itself was killed, or ended well.
            return dict.fromkeys(range(self.count), self.process.returncode)
        return {int(rank): status for rank, status in content.items()}

    def kill(self) -> None:
        """Ends every process of the attempt but this one, those that left its tree too."""
        end_processes(self.folder.path, root=unreaped(self.process))
        self.process.wait()

    def _end_stragglers(self) -> None:
        """Kills ranks that outlive another one; torchrun stays, to tell who was the first."""
        if len(self._all) < self.count:
            self._all = self._present()
            return
        remaining = [rank for rank in self._all if alive(rank)]
        if len(remaining) < self.count:
            now = time.monotonic()
            self._others_deadline = min(self._others_deadline, now + OUTLIVE_SECONDS)
            if now >= self._others_deadline:
                kill(remaining)

    def _present(self) -> list[psutil.Process]:
        """The ranks; torchrun itself where it has not started them yet."""
        try:
            main = psutil.Process(self.process.pid)
            return (main.children() if self.count > 1 else []) or [main]
        except psutil.NoSuchProcess:
            return []


@contextlib.contextmanager
def started(
    folder: AttemptFolder, program: Sequence[str], *, count: int, threads: int | None
) -> Iterator[Ranks]:
    """Starts `program FOLDER` once for each rank.

    However the context is left, no process of the attempt is left behind but this one.

    Args:
        threads: of each rank; None: the cores over the ranks.
    """
    process = subprocess.Popen(
        _command(folder, program, count),
        env=_environment(count, threads),
        stdin=subprocess.DEVNULL,
    )
    ranks = Ranks(process, folder, count)
    try:
        yield ranks
    finally:
        ranks.kill()


def _command(folder: AttemptFolder, program: Sequence[str], count: int) -> list[str]:
    rank = ["-m", f"{_AGENT}.rank", str(folder.path), *program, str(folder.path)]
    if count == 1:
        return [sys.executable, *rank]
    torchrun = [sys.executable, "-m", f"{_AGENT}.torchrun", str(_torchrun_exits(folder))]
    torchrun += ["--standalone", "--local-addr=127.0.0.1", "--max-restarts=0"]
    torchrun += [f"--nproc-per-node={count}", "--no-python"]
    return [*torchrun, sys.executable, *rank]


def _environment(count: int, threads: int | None) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in _OTHERS_RANK}
    share = threads or max(1, len(os.sched_getaffinity(0)) // count)
    return kept | {"OMP_NUM_THREADS": str(share)}


def _torchrun_exits(folder: AttemptFolder) -> Path:
    return folder.path / "torchrun.json"
