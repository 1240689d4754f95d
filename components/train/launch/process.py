"""Ranks as processes on this machine: plain Python for one, torchrun for several."""

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

from steadytrain.components.shared.config import ComputeConfig
from steadytrain.components.train.attempt import AttemptFolder

RANK_PROGRAM = (sys.executable, "-m", "steadytrain.components.train.loop.main")
OUTLIVE_SECONDS = 8.0
"""Time for the other ranks to follow one that is down; torchrun alone would wait for 30 s."""
MARK = "STEADYTRAIN_ATTEMPT"
"""Variable that every process of an attempt inherits, orphans too; its value is the folder."""

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
_LAUNCH = "steadytrain.components.train.launch"


class ProcessLauncher:
    """Starts `program FOLDER` once for each rank.

    Args:
        program: command of a rank; the attempt's folder is added to it.
    """

    def __init__(self, compute: ComputeConfig, program: Sequence[str] = RANK_PROGRAM) -> None:
        self.compute, self.program = compute, tuple(program)

    @property
    def world_size(self) -> int:
        return self.compute.nproc_per_node

    @contextlib.contextmanager
    def start(self, folder: AttemptFolder) -> Iterator[ProcessAttempt]:
        with folder.path.joinpath("launcher.log").open("ab") as log:
            # A session of its own: Ctrl-C on the terminal reaches the supervisor alone.
            process = subprocess.Popen(
                self._command(folder),
                env=self._environment(folder),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        attempt = ProcessAttempt(process, folder, self.world_size)
        try:
            yield attempt
        finally:
            attempt.kill()

    def _command(self, folder: AttemptFolder) -> list[str]:
        rank = ["-m", f"{_LAUNCH}.rank", str(folder.path), *self.program, str(folder.path)]
        if self.world_size == 1:
            return [sys.executable, *rank]
        torchrun = [sys.executable, "-m", f"{_LAUNCH}.torchrun", str(_exits(folder))]
        torchrun += ["--standalone", "--local-addr=127.0.0.1", "--max-restarts=0"]
        torchrun += [f"--nproc-per-node={self.world_size}", "--no-python"]
        return [*torchrun, sys.executable, *rank]

    def _environment(self, folder: AttemptFolder) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if name not in _OTHERS_RANK}
        cores = len(os.sched_getaffinity(0))
        threads = self.compute.threads_per_rank or max(1, cores // self.world_size)
        return kept | {MARK: str(folder.path), "OMP_NUM_THREADS": str(threads)}


class ProcessAttempt:
    """The processes of one attempt."""

    def __init__(
        self, process: subprocess.Popen[bytes], folder: AttemptFolder, world_size: int
    ) -> None:
        self.process, self.folder, self.world_size = process, folder, world_size
        self._deadline = self._others_deadline = float("inf")
        self._all_ranks: list[psutil.Process] = []

    def poll(self) -> bool:
        if time.monotonic() >= self._deadline:
            self.kill()
        elif self.world_size > 1:
            self._end_stragglers()
        return self.process.poll() is not None

    def stop(self, grace_seconds: float) -> None:
        self._deadline = min(self._deadline, time.monotonic() + grace_seconds)
        for rank in self._ranks():
            with contextlib.suppress(psutil.NoSuchProcess):
                rank.send_signal(signal.SIGTERM)

    def exits(self) -> Mapping[int, int]:
        if self.world_size == 1:
            return {0: self.process.returncode}
        try:
            content = json.loads(_exits(self.folder).read_bytes())
        except FileNotFoundError:
            # torchrun itself was killed, or ended well.
            return dict.fromkeys(range(self.world_size), self.process.returncode)
        return {int(rank): status for rank, status in content.items()}

    def kill(self) -> None:
        """Ends every process of the attempt, those that left its tree too."""
        end_processes(self.folder.path, self.process.pid)
        self.process.wait()

    def _end_stragglers(self) -> None:
        """Kills ranks that outlive another one; torchrun stays, to tell who was the first."""
        if len(self._all_ranks) < self.world_size:
            self._all_ranks = self._ranks()
            return
        remaining = [rank for rank in self._all_ranks if _alive(rank)]
        if len(remaining) < self.world_size:
            now = time.monotonic()
            self._others_deadline = min(self._others_deadline, now + OUTLIVE_SECONDS)
            if now >= self._others_deadline:
                _kill(remaining)

    def _ranks(self) -> list[psutil.Process]:
        """The ranks; torchrun itself where it has not started them yet."""
        try:
            main = psutil.Process(self.process.pid)
            return (main.children() if self.world_size > 1 else []) or [main]
        except psutil.NoSuchProcess:
            return []


def end_processes(folder: Path, root: int | None = None) -> None:
    """Kills what is marked with an attempt's folder, or one below it, and the tree of `root`."""
    while remaining := processes_of(folder, root):
        _kill(remaining)
        time.sleep(0.02)


def processes_of(folder: Path, root: int | None = None) -> list[psutil.Process]:
    """Live processes marked with an attempt's folder, or one below it, and the tree of `root`."""
    found = {process for process in psutil.process_iter() if _is_of(process, folder)}
    with contextlib.suppress(psutil.NoSuchProcess):
        if root is not None:
            main = psutil.Process(root)
            found.update([main, *main.children(recursive=True)])
    return [process for process in found if _alive(process)]


def _kill(processes: Sequence[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def _is_of(process: psutil.Process, folder: Path) -> bool:
    try:
        mark = process.environ().get(MARK, "")
    except (psutil.Error, OSError):
        return False
    return mark != "" and process.pid != os.getpid() and Path(mark).is_relative_to(folder)


def _alive(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _exits(folder: AttemptFolder) -> Path:
    return folder.path / "exits.json"
