"""What can happen to a training run from outside, one function of the scene per fault.

The product contains none of these functions. They send signals to processes, change bytes on disk,
stop a server, or set a limit that the kernel enforces.
"""

from __future__ import annotations

import contextlib
import os
import random
import resource
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from steadytrain.components.shared.stopping import die_with_parent
from steadytrain.components.shared.workspace import Workspace
from steadytrain.components.train.attempt import AttemptFolder, Beat
from steadytrain.components.train.checkpoint.store import committed

from support.clocks import Clock
from support.command import wait_for
from support.stores import Server

TRACKING_OUT_SECONDS = 5.0


@dataclass
class Program:
    """A restartable command in its own session, which dies with this process."""

    line: list[str]
    log: Path
    environment: Mapping[str, str]
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.line,
                env=dict(self.environment),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )

    @property
    def status(self) -> int | None:
        """The exit status, or None while it runs."""
        assert self.process is not None
        return self.process.poll()

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()


@dataclass
class Scene:
    """A training run and everything it depends on.

    attempt: the current attempt.
    damaged: by attempt, the step of the checkpoint that was damaged as that attempt ended.
    """

    workspace: Workspace
    ranks: int
    program: Program
    server: Server
    draw: random.Random
    clock: Clock
    attempt: int = 0
    damaged: dict[int, int] = field(default_factory=dict)
    memory: Shortage = field(default_factory=lambda: Shortage())

    def pid(self, rank: int) -> int:
        """Return the PID of a rank of the current attempt."""
        beat = Beat.read(self.folder.heartbeat(rank))
        assert beat is not None
        return beat.pid

    @property
    def any_rank(self) -> int:
        return self.pid(self.draw.randrange(self.ranks))

    @property
    def folder(self) -> AttemptFolder:
        return AttemptFolder(self.workspace.attempts / f"{self.attempt:04d}")


def rank_killed(scene: Scene) -> None:
    os.kill(scene.any_rank, signal.SIGKILL)


def rank_stopped(scene: Scene) -> None:
    os.kill(scene.any_rank, signal.SIGSTOP)


def supervisor_killed(scene: Scene) -> None:
    """Kill and restart the supervisor; the new one has only the ledger."""
    scene.program.kill()
    scene.program.start()


def checkpoint_damaged(scene: Scene) -> None:
    """Flip one bit of the newest checkpoint, then kill the rank that would write a newer one."""
    first = scene.pid(0)
    os.kill(first, signal.SIGSTOP)
    wait_for(lambda: psutil.Process(first).status() == psutil.STATUS_STOPPED)
    newest = committed(scene.workspace.checkpoints)[-1]
    scene.damaged[scene.attempt] = newest.step
    path = scene.draw.choice(sorted(Path(str(newest)).glob("*.safetensors")))
    content = bytearray(path.read_bytes())
    content[scene.draw.randrange(len(content))] ^= 1 << scene.draw.randrange(8)
    path.write_bytes(content)
    os.kill(first, signal.SIGKILL)


def tracking_killed(scene: Scene) -> None:
    """Kill the tracking server; restart it after a while on the same port, with its stored data."""
    scene.server.kill()
    time.sleep(TRACKING_OUT_SECONDS)
    scene.server.start()


def clock_set(scene: Scene) -> None:
    """Set the clock of every process of the run, back or forward, by seconds to months."""
    seconds = int(10 ** scene.draw.uniform(0, 7))
    scene.clock.set(scene.draw.choice((-1, 1)) * seconds)


def memory_short(scene: Scene) -> None:
    """From now on, no rank has the memory that the current micro-batch needs."""
    scene.memory.measure(scene.pid(0), seconds=6)
    scene.memory.keep(scene.pid(0))


Disturbance = Callable[[Scene], None]
DISTURBANCES: tuple[Disturbance, ...] = (
    rank_killed,
    rank_stopped,
    supervisor_killed,
    checkpoint_damaged,
    tracking_killed,
    clock_set,
)


class Shortage:
    """A limit on the address space, between the peaks of a micro-batch and of half of it."""

    def __init__(self) -> None:
        self.limit = 0

    def measure(self, pid: int, seconds: float) -> None:
        """Find the limit: the memory between two steps plus 3/4 of what a step adds.

        Args:
            seconds: how long to sample the process; must cover several steps.
        """
        looks, end = [], time.monotonic() + seconds
        process = psutil.Process(pid)
        while time.monotonic() < end:
            looks.append(process.memory_info().vms)
            time.sleep(0.002)
        self.limit = min(looks) + (max(looks) - min(looks)) * 3 // 4

    def keep(self, pid: int) -> None:
        """Apply the limit to a rank."""
        if self.limit:
            with contextlib.suppress(ProcessLookupError):
                resource.prlimit(pid, resource.RLIMIT_AS, (self.limit, self.limit))
