"""The ranks on this node: the agent starts them, and ends the others once one has failed.

As a program, `python -m ...agent.ranks FOLDER COMMAND...`, this is one rank. It dies with its
parent, so an agent that is killed without warning leaves no rank behind.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from steadytrain.components.shared.errors import Unkillable
from steadytrain.components.shared.output_log import redact_file
from steadytrain.components.shared.redaction import traceback_of
from steadytrain.components.shared.stopping import die_with_parent
from steadytrain.components.train.agent import forking
from steadytrain.components.train.agent.processes import MARK, Process, end_processes, reserved_port
from steadytrain.components.train.attempt import AttemptFolder

OUTLIVE_SECONDS = 8.0
"""How long the other ranks may outlive one that has failed."""
_END_SECONDS = 60.0
"""How long they may outlive one that ends as they do. A busy machine takes seconds to end a
process, and a rank that is killed then would count as failed."""

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
_NCCL_ERRORS = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


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
        processes: by rank.
        folder: the node's folder.
    """

    def __init__(self, processes: Mapping[int, Process], folder: Path) -> None:
        self.folder = folder
        self._running, self._exits = dict(processes), dict[int, int]()
        self._asked = False
        self._deadline = float("inf")
        self._stuck: Unkillable | None = None

    def all_exited(self) -> bool:
        """Return whether all ranks are down. Kill those that exceed their time.

        Raises:
            Unkillable: see `kill`.
        """
        self._follow()
        if self._running and time.monotonic() >= self._deadline:
            self.kill()
        return not self._running

    def leave(self, grace_seconds: float) -> None:
        """Ask every rank to leave, and return immediately.

        A second call with a shorter grace period shortens the deadline.
        """
        self._asked = True
        self._limit(grace_seconds)
        for process in self._running.values():
            # It is not reaped yet, so no other process has its ID.
            os.kill(process.pid, signal.SIGTERM)

    def exits(self) -> Mapping[int, int]:
        """Return the exit status by rank (negative: a signal), the earliest failure first."""
        return dict(sorted(self._exits.items(), key=lambda item: item[1] == 0))

    def kill(self) -> None:
        """Kill every process of the node but this one, including any that left its process tree.

        Raises:
            Unkillable: one of them does not end. Later calls raise it at once.
        """
        if self._stuck is None:
            try:
                end_processes(self.folder, root=os.getpid(), spared=[os.getpid()])
            except Unkillable as error:
                self._stuck = error
        if self._stuck is not None:
            raise self._stuck
        for process in self._running.values():
            process.wait()
        self._follow()

    def _follow(self) -> None:
        """See which ranks have ended. The others can't go on without them."""
        statuses = {rank: process.poll() for rank, process in self._running.items()}
        ended = {rank: status for rank, status in statuses.items() if status is not None}
        # Between two looks, a rank that a signal killed may have made another one fail.
        for rank in sorted(ended, key=lambda rank: ended[rank] >= 0):
            del self._running[rank]
            self._exits[rank] = ended[rank]
        if any(ended.values()) and not self._asked:
            self.leave(OUTLIVE_SECONDS)
        elif ended:
            self._limit(_END_SECONDS)

    def _limit(self, seconds: float) -> None:
        self._deadline = min(self._deadline, time.monotonic() + seconds)


@contextlib.contextmanager
def started(
    folder: AttemptFolder, program: Sequence[str], share: NodeShare, *, threads: int | None
) -> Iterator[Ranks]:
    """Start `program FOLDER` once for each rank of this node.

    On exit from the context, for any reason, every process of the node except this one is gone, or
    Unkillable says which one is not.
    With several nodes, the ranks meet at PET_MASTER_ADDR and PET_MASTER_PORT, where rank 0 listens.

    Args:
        threads: threads of each rank. None means the number of cores divided by the ranks.
    """
    node = folder.node(share.node).path
    command = [str(folder.path), *program, str(folder.path)]
    with contextlib.ExitStack() as reserved:
        meeting = {} if share.alone else reserved.enter_context(_meeting(share))
        environment = _environment(node, share, threads) | meeting
        ranks = Ranks(
            {rank: _start(command, environment | _numbers(share, rank)) for rank in share.ranks},
            node,
        )
        try:
            yield ranks
        finally:
            try:
                ranks.kill()
            finally:
                for rank in share.ranks:
                    # Output of native code and other programs.
                    redact_file(folder.log(rank))


def _start(command: Sequence[str], environment: Mapping[str, str]) -> Process:
    if forking.possible():
        return forking.Forked(partial(main, *command), environment)
    return subprocess.Popen(
        [sys.executable, "-m", __name__, *command],
        env=environment,
        stdin=subprocess.DEVNULL,
    )


@contextlib.contextmanager
def _meeting(share: NodeShare) -> Iterator[dict[str, str]]:
    """Yield the variables of the address where the ranks meet."""
    if share.nodes > 1:
        host, port = os.environ["PET_MASTER_ADDR"], os.environ["PET_MASTER_PORT"]
        yield {"MASTER_ADDR": host, "MASTER_PORT": port}
        return
    with reserved_port() as (host, number):
        yield {"MASTER_ADDR": host, "MASTER_PORT": str(number)}


def _numbers(share: NodeShare, rank: int) -> dict[str, str]:
    """Return the variables that tell a rank which one it is. One that is alone has none."""
    if share.alone:
        return {}
    numbers = {
        "RANK": rank,
        "LOCAL_RANK": rank - share.ranks[0],
        "WORLD_SIZE": share.nodes * share.count,
        "LOCAL_WORLD_SIZE": share.count,
        "GROUP_RANK": share.node,
    }
    # As torchrun sets it: a rank that waits for a lost one ends, and aborts its communicators.
    handling = {_NCCL_ERRORS: os.environ.get(_NCCL_ERRORS, "1")}
    return handling | {name: str(number) for name, number in numbers.items()}


def _environment(node: Path, share: NodeShare, threads: int | None) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in _OTHERS_RANK}
    each = threads_of_each(share.count, threads)
    return kept | {"OMP_NUM_THREADS": str(each), MARK: str(node)}


def threads_of_each(ranks: int, threads: int | None) -> int:
    """Return the threads of each rank of a node: `threads`, or the cores divided by the ranks."""
    return threads or max(1, len(os.sched_getaffinity(0)) // ranks)


def main(folder: str, *command: str) -> int:
    """Turn this process into a rank, whose output goes to the attempt's folder."""
    die_with_parent()
    forking.write_to(AttemptFolder(Path(folder)).log(int(os.environ.get("RANK", "0"))))
    if not forking.possible() or command[0] != sys.executable:
        os.execv(command[0], command)
    return _run(command[1:])


def _run(program: Sequence[str]) -> int:
    """Do what Python does with these arguments, but use the modules that are already imported."""
    _use_threads()
    is_module = program[0] == "-m"
    sys.argv = list(program[1:] if is_module else program)
    try:
        if is_module:
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(sys.argv[0], run_name="__main__")
    except Exception as error:
        # Print it here. Otherwise it would end up in the log of the process that forked this one.
        print(traceback_of(error), end="", file=sys.stderr)
        return 1
    return 0


def _use_threads() -> None:
    """Let torch use as many threads as a new process would: it has read the variable already."""
    if "torch" in sys.modules and "OMP_NUM_THREADS" in os.environ:
        sys.modules["torch"].set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
