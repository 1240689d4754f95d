"""The ranks on this node: plain Python if the attempt has only one, torchrun otherwise."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil

from steadytrain.components.shared.errors import Unkillable
from steadytrain.components.shared.logs.output import redact_file
from steadytrain.components.train.agent import forking, torchrun
from steadytrain.components.train.agent import rank as one_rank
from steadytrain.components.train.agent.processes import (
    KILL_SECONDS,
    MARK,
    Process,
    alive,
    end_processes,
    kill,
    unreaped,
)
from steadytrain.components.train.attempt import AttemptFolder, NodeFolder

OUTLIVE_SECONDS = 8.0
"""How long the other ranks may outlive one that is down; torchrun alone would wait for 30 s."""

# A program that is itself a rank must not pass these variables on.
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


@dataclass(frozen=True)
class NodeShare:
    """This node's share of the ranks.

    node: this node's number, from 0.
    nodes: number of nodes of the attempt.
    count: number of ranks on each node.
    """

    node: int
    nodes: int
    count: int

    @property
    def ranks(self) -> range:
        return range(self.node * self.count, (self.node + 1) * self.count)

    @property
    def alone(self) -> bool:
        """Whether the attempt has only one rank, with no others to connect to."""
        return self.nodes * self.count == 1


class Ranks:
    """The processes of a node's ranks.

    Args:
        process: the rank itself if the attempt has only one, torchrun otherwise.
        folder: the node's folder.
    """

    def __init__(self, process: Process, folder: Path, share: NodeShare) -> None:
        self.process, self.folder, self.share = process, folder, share
        self._deadline = self._others_deadline = float("inf")
        self._stuck: Unkillable | None = None

    def down(self) -> bool:
        """Return whether all ranks are down. Kill those that exceed their time.

        Raises:
            Unkillable: see `kill`.
        """
        if time.monotonic() >= self._deadline:
            self.kill()
        elif self.share.count > 1:
            self._end_stragglers()
        return self.process.poll() is not None

    def leave(self, grace_seconds: float) -> None:
        """Ask every rank to leave, and return immediately.

        A second call with a shorter grace period shortens the deadline.
        """
        self._deadline = min(self._deadline, time.monotonic() + grace_seconds)
        for rank in self._present():
            with contextlib.suppress(psutil.NoSuchProcess):
                rank.send_signal(signal.SIGTERM)

    def exits(self) -> Mapping[int, int]:
        """Return the exit status by rank (negative: a signal), the earliest failure first."""
        if self.share.alone:
            return {0: self._status()}
        try:
            content = json.loads(NodeFolder(self.folder).torchrun.read_bytes())
        except FileNotFoundError:
            # torchrun itself was killed, or succeeded.
            return dict.fromkeys(self.share.ranks, self._status())
        return {int(rank): status for rank, status in content.items()}

    def kill(self) -> None:
        """Kill every process of the node but this one, including any that left its process tree.

        Raises:
            Unkillable: one of them does not end. Later calls raise it at once.
        """
        if self._stuck is None:
            try:
                end_processes(self.folder, root=unreaped(self.process))
            except Unkillable as error:
                self._stuck = error
        if self._stuck is not None:
            raise self._stuck
        self.process.wait()

    def _status(self) -> int:
        status = self.process.poll()
        assert status is not None
        return status

    def _end_stragglers(self) -> None:
        """Kill ranks that outlive another one. Keep torchrun: it reports which one failed first."""
        remaining = [rank for rank in self._started() if alive(rank)]
        if len(remaining) in (0, self.share.count):
            self._others_deadline = float("inf")
            return
        # One rank is down or not started yet. Both count as down: starting takes no time, and a
        # rank may die before it is ever seen alive.
        now = time.monotonic()
        self._others_deadline = min(self._others_deadline, now + OUTLIVE_SECONDS)
        if now >= self._others_deadline:
            kill(remaining)
            # torchrun would wait forever for one that does not end.
            self._deadline = min(self._deadline, now + KILL_SECONDS)

    def _present(self) -> list[psutil.Process]:
        """Return the ranks, or torchrun itself if it has not started them yet."""
        with contextlib.suppress(psutil.NoSuchProcess):
            return self._started() or [psutil.Process(self.process.pid)]
        return []

    def _started(self) -> list[psutil.Process]:
        """Return the processes that torchrun has started."""
        with contextlib.suppress(psutil.NoSuchProcess):
            if not self.share.alone:
                return psutil.Process(self.process.pid).children()
        return []


@contextlib.contextmanager
def started(
    folder: AttemptFolder,
    program: Sequence[str],
    share: NodeShare,
    *,
    threads: int | None,
    longest_wait: float,
) -> Iterator[Ranks]:
    """Start `program FOLDER` once for each rank of this node.

    On exit from the context, for any reason, every process of the node except this one is gone, or
    Unkillable says which one is not.
    With several nodes, the ranks meet at PET_MASTER_ADDR and PET_MASTER_PORT, which torchrun reads.

    Args:
        threads: threads of each rank. None means the number of cores divided by the ranks.
        longest_wait: seconds that the nodes wait for each other.
    """
    node = folder.node(share.node).path
    options = _torchrun_options(share, longest_wait)
    process = _start(folder, program, share, options, _environment(node, share, threads))
    ranks = Ranks(process, node, share)
    try:
        yield ranks
    finally:
        try:
            ranks.kill()
        finally:
            for rank in share.ranks:
                # Of what native code and other programs have printed.
                redact_file(folder.log(rank))


def _start(
    folder: AttemptFolder,
    program: Sequence[str],
    share: NodeShare,
    options: Sequence[str],
    environment: Mapping[str, str],
) -> Process:
    one = [str(folder.path), *program, str(folder.path)]
    node = folder.node(share.node).path
    several = [str(node), str(share.ranks[0]), *options]
    if forking.possible():
        several += ["--start-method=fork", "--run-path", one_rank.__file__, *one]
        main = partial(one_rank.main, *one) if share.alone else partial(torchrun.main, *several)
        return forking.Forked(main, environment)
    as_rank = [sys.executable, "-m", f"{_AGENT}.rank", *one]
    through_torchrun = [sys.executable, "-m", f"{_AGENT}.torchrun", *several, "--no-python"]
    command = as_rank if share.alone else [*through_torchrun, *as_rank]
    return subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL)


def _torchrun_options(share: NodeShare, longest_wait: float) -> list[str]:
    options = [f"--nnodes={share.nodes}", f"--nproc-per-node={share.count}", "--max-restarts=0"]
    # Otherwise torchrun leaves a folder in TMPDIR.
    options.append(f"--log-dir={os.devnull}")
    if share.nodes == 1:
        return [*options, "--standalone", "--local-addr=127.0.0.1"]
    return [*options, f"--node-rank={share.node}", f"--rdzv-conf=timeout={math.ceil(longest_wait)}"]


def _environment(node: Path, share: NodeShare, threads: int | None) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in _OTHERS_RANK}
    each = threads_of_each(share.count, threads)
    return kept | {"OMP_NUM_THREADS": str(each), MARK: str(node)}


def threads_of_each(ranks: int, threads: int | None) -> int:
    """Return the threads of each rank of a node: `threads`, or the cores divided by the ranks."""
    return threads or max(1, len(os.sched_getaffinity(0)) // ranks)
