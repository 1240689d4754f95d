"""Ranks forked from a process that has already imported everything.

Most of a rank's startup time is Python's imports. These ranks share one set of imports for all
attempts of a test session. Everything else is real: processes, signals, gloo.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import re
import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from steadytrain.components.train.attempt import AttemptFolder
from steadytrain.components.train.launch.launcher import Launcher
from steadytrain.components.train.recovery.outcome import Outcome
from steadytrain.components.train.recovery.supervisor import Supervisor

from support.pause import pause_this_process
from support.ports import free_port
from support.training import TEST_ENVIRONMENT, Bench

OUTLIVE_SECONDS = 120.0
_ARENA_MAX = -8
"""M_ARENA_MAX of glibc's malloc.h."""
_PRELOAD = [
    "torch",
    "torch.distributed",
    "transformers.models.llama.modeling_llama",
    "transformers.models.gpt2.modeling_gpt2",
    "steadytrain.components.shared.config",
    "steadytrain.components.tasks.causal_lm",
    "steadytrain.components.tasks.fused_head",
    "steadytrain.components.train.loop.main",
    "steadytrain.components.train.loop.training",
]


def run_rank(folder: str, number: int, environment: Mapping[str, str]) -> None:
    """Run a rank from start to end; its output goes to the log of a launched rank.

    ADDRESS_SPACE limits its memory in bytes. It writes its peak to FOLDER/peak. It waits where
    `support.pause` says.
    """
    import torch

    from steadytrain.components.train.loop.main import main

    os.environ.update(environment)
    if "PAUSE_FILE" in environment:
        pause_this_process(environment)
    torch.set_num_threads(1)
    # Each further arena takes 64 MB of addresses, and threads that meet in malloc make one.
    ctypes.CDLL(None).mallopt(_ARENA_MAX, 1)
    limit = int(environment.get("ADDRESS_SPACE", 0))
    if limit:
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    log = AttemptFolder(Path(folder)).log(number)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, sys.stdout.fileno())
    os.dup2(descriptor, sys.stderr.fileno())
    status = main(folder)
    Path(folder, "peak").write_text(str(peak()))
    sys.exit(status)


def peak() -> int:
    """Return this process's peak address space in bytes, as recorded by the kernel."""
    found = re.search(r"VmPeak:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) * 1024


def on_ranks(ranks: int, function: Callable[..., None], *arguments: Any) -> None:
    """Call a module-level function on each rank of a world; fail if any rank fails."""
    import torch

    multiprocessing.get_context("forkserver").set_forkserver_preload(_PRELOAD)
    torch.multiprocessing.start_processes(
        _on_rank,
        (ranks, free_port(), function, arguments),
        nprocs=ranks,
        start_method="forkserver",
    )


def _on_rank(
    rank: int, ranks: int, port: int, function: Callable[..., None], arguments: tuple[Any, ...]
) -> None:
    import torch

    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    os.environ.update({name: str(value) for name, value in numbers.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), **TEST_ENVIRONMENT)
    torch.set_num_threads(1)
    function(*arguments)


class ForkedLauncher:
    """Forks the ranks of an attempt, without torchrun.

    environment: additional variables for the ranks.
    exits: the exit codes by rank of each finished attempt.
    """

    device = "cpu"
    host_memory = 2**34

    def __init__(self, ranks: int = 1, **environment: str) -> None:
        self.world_size, self.environment = ranks, environment
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(_PRELOAD)
        self.ranks: list[BaseProcess] = []
        self.exits: list[Mapping[int, int]] = []

    @contextlib.contextmanager
    def start(self, folder: AttemptFolder) -> Iterator[ForkedRanks]:
        self.ranks = [
            self.context.Process(target=run_rank, args=(str(folder.path), number, environment))
            for number, environment in enumerate(self._environments(folder))
        ]
        for rank in self.ranks:
            rank.start()
        running = ForkedRanks(self.ranks)
        try:
            yield running
        finally:
            self.kill(*range(self.world_size))
            self.exits.append(running.exits())

    def _environments(self, folder: AttemptFolder) -> list[dict[str, str]]:
        alike = {**TEST_ENVIRONMENT, "STEADYTRAIN_ATTEMPT": str(folder.path)}
        alike |= self.environment
        if self.world_size == 1:
            return [alike]
        alike |= {
            "WORLD_SIZE": str(self.world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
        }
        return [
            alike | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(self.world_size)
        ]

    def kill(self, *ranks: int) -> None:
        """Send SIGKILL, without a grace period."""
        for rank in ranks:
            self.ranks[rank].kill()
        for rank in ranks:
            self.ranks[rank].join()


class ForkedRanks:
    """The ranks of one attempt, as the supervisor follows them."""

    def __init__(self, ranks: list[BaseProcess]) -> None:
        self.ranks, self.order = ranks, list[int]()
        self.deadline = float("inf")

    def poll(self) -> bool:
        for number, rank in enumerate(self.ranks):
            if rank.exitcode is not None and number not in self.order:
                self.order.append(number)
                self.deadline = min(self.deadline, time.monotonic() + OUTLIVE_SECONDS)
        if time.monotonic() > self.deadline:
            for rank in self.ranks:
                rank.kill()
        return len(self.order) == len(self.ranks)

    def stop(self, grace_seconds: float) -> None:
        self.deadline = min(self.deadline, time.monotonic() + grace_seconds)
        for rank in self.ranks:
            if rank.exitcode is None:
                rank.terminate()

    def wait(self) -> None:
        """Wait until all ranks have exited."""
        while not self.poll():
            time.sleep(0.02)

    def exits(self) -> Mapping[int, int]:
        return {number: self.ranks[number].exitcode or 0 for number in self.order}


def train(bench: Bench, *, launcher: Launcher | None = None, **options: Any) -> Outcome:
    """Train a run under the product's supervisor, with forked ranks."""
    launcher = launcher or ForkedLauncher(bench.config.compute.nproc_per_node)
    return Supervisor(bench.config, bench.data, launcher, **options).run()
