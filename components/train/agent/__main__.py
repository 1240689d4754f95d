"""An agent: `python -m steadytrain.components.train.agent --ranks N FOLDER COMMAND...`.

Runs the ranks of an attempt on this node, one agent per node. It reads requests from the attempt's
folder (or receives SIGTERM), and writes its reports there. It knows its supervisor only through the
lease.

Exit status: 0 if the ranks succeeded, 143 if they left on SIGTERM, 1 otherwise.

With `--serve`, it is the agent of this machine for all attempts of a run (`serve`). It has imported
what ranks need, so that they are forked from it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from steadytrain.components.shared.config import load
from steadytrain.components.shared.errors import Unkillable
from steadytrain.components.shared.lease import Renewal
from steadytrain.components.shared.periodic import pause
from steadytrain.components.shared.processes import oom_kills, set_title
from steadytrain.components.shared.retry import retry_storage
from steadytrain.components.shared.stopping import StopRequest, die_with_parent, stop_requests
from steadytrain.components.shared.storage import LocalStorage
from steadytrain.components.shared.storage.local import Awaited
from steadytrain.components.shared.workspace import Workspace
from steadytrain.components.train.agent import forking
from steadytrain.components.train.agent.fork_server import ENDED, SERVE, Requests, requests_of
from steadytrain.components.train.agent.hang import HangWatch
from steadytrain.components.train.agent.ranks import NodeShare, Ranks, started
from steadytrain.components.train.attempt import (
    PREEMPTED_EXIT,
    AttemptFolder,
    AttemptSpec,
    Exits,
    Heartbeat,
    RankError,
)
from steadytrain.components.train.offloaded import folder_of, swept

_POLL_SECONDS = 0.1


class Agent:
    """Follows the ranks of one attempt on one node until all of them are down."""

    def __init__(self, folder: AttemptFolder, share: NodeShare) -> None:
        spec = AttemptSpec.load(folder.spec)
        config = load(Path(spec.config))
        set_title(f"agent of {spec.run_id}")
        self.folder, self.share, self.recovery = folder, share, config.recovery
        self.node = folder.node(share.node)
        self.lease = Renewal(
            LocalStorage(Workspace.of(config).lease), spec.generation, self.recovery.lease_seconds
        )
        self.offloaded = folder_of(config, share.node)
        self.hangs = HangWatch(folder, share, self.recovery)
        self.leave = Awaited(folder.leave)
        self.requested_grace: float | None = None
        self.stuck = False
        """Whether a rank cannot be killed. The interpreter would wait for it at exit."""

    def run(self, program: Sequence[str], threads: int | None) -> int:
        """Start the ranks. Return this program's exit status once all of them are down."""
        self.node.path.mkdir(parents=True, exist_ok=True)
        heartbeat, kills = Heartbeat(self.node.heartbeat), oom_kills()
        try:
            with (
                contextlib.closing(heartbeat),
                swept(self.offloaded),
                stop_requests() as request,
                started(self.folder, program, self.share, threads=threads) as ranks,
            ):
                began = time.monotonic()
                while not ranks.all_exited():
                    heartbeat.beat("follow")
                    if heartbeat.refusal:
                        # The ranks write to the same folder.
                        self.hangs.excuse()
                    self._follow(ranks, request)
                    pause(began, _POLL_SECONDS)
            exits = ranks.exits()
        except Unkillable as error:
            exits = self._report_unkillable(error)
        if oom_kills() > kills:
            self._report_out_of_memory(exits)
        written = Exits(time=time.time(), statuses=dict(exits))
        retry_storage(lambda: written.save(self.node.exits))
        return _status(exits)

    def _follow(self, ranks: Ranks, request: StopRequest) -> None:
        grace = self._grace(request)
        if grace is not None and (self.requested_grace is None or grace < self.requested_grace):
            self.requested_grace = grace
            ranks.leave(grace)
        elif self.requested_grace is None and self.hangs.look():
            self.requested_grace = 0.0
            ranks.leave(0)

    def _grace(self, request: StopRequest) -> float | None:
        """Return the seconds that the ranks have to leave; None if nobody asked them to."""
        graces = []
        if request.outcome is not None:
            graces.append(0.0 if request.urgent else self.recovery.stop_grace_seconds)
        # Storage that cannot be read now is looked at again.
        with contextlib.suppress(OSError):
            if self.leave.there():
                graces.append(float(self.folder.leave.read_text()))
        if self.lease.lapsed():
            # The ranks use the other half of the lease time; then another supervisor may start.
            graces.append(min(self.recovery.stop_grace_seconds, self.recovery.lease_seconds / 2))
        return min(graces, default=None)

    def _report_unkillable(self, why: Unkillable) -> Mapping[int, int]:
        """Report ranks that do not end, and return their exit statuses as if they had."""
        self.stuck = True
        file = Awaited(self.node.error)
        hang = RankError.load(self.node.error) if file.there() else None
        RankError(
            rank=self.share.ranks[0],
            kind="Unkillable",
            message=f"{why.message}; before: {hang.message}" if hang else why.message,
            step=hang.step if hang else 0,
            still_since=hang.still_since if hang else 0.0,
        ).save(self.node.error)
        return dict.fromkeys(self.share.ranks, -signal.SIGKILL)

    def _report_out_of_memory(self, exits: Mapping[int, int]) -> None:
        killed = [rank for rank, status in exits.items() if status == -signal.SIGKILL]
        if not killed or self.requested_grace is not None:
            return
        RankError(
            rank=killed[0],
            kind="OOMKilled",
            message="the kernel killed it because the memory of its control group ran out",
        ).save(self.node.error)


def _status(exits: Mapping[int, int]) -> int:
    left = {PREEMPTED_EXIT, -signal.SIGTERM}
    statuses = set(exits.values()) - {0}
    if not statuses:
        return 0
    return PREEMPTED_EXIT if statuses <= left else 1


def main(arguments: Sequence[str]) -> int:
    """Run an agent. Return its exit status."""
    parser = argparse.ArgumentParser(prog="agent", description="Runs the ranks of an attempt.")
    parser.add_argument("folder", type=Path, help="the attempt's folder")
    parser.add_argument("--ranks", type=int, required=True, help="how many, on each node")
    parser.add_argument(
        "--nodes",
        type=int,
        default=_variable("PET_NNODES", 1),
        help="of the attempt (PET_NNODES)",
    )
    parser.add_argument(
        "--node",
        type=int,
        default=_variable("PET_NODE_RANK", 0),
        help="this one (PET_NODE_RANK)",
    )
    parser.add_argument("--threads", type=int, help="of each rank; none: the cores over the ranks")
    parser.add_argument("program", nargs=argparse.REMAINDER, help="a rank's command")
    given = parser.parse_args(arguments)
    die_with_parent()
    share = NodeShare(given.node, given.nodes, given.ranks)
    agent = Agent(AttemptFolder(given.folder), share)
    status = agent.run(given.program, given.threads)
    if agent.stuck:
        os._exit(status)
    return status


def serve(requests: Requests) -> int:
    """Run an attempt for each request, whose arguments are those of `main`."""
    die_with_parent()
    outputs = {number: os.dup(number) for number in (1, 2)}
    while (request := requests.receive()) is not None:
        request.become()
        status = main(request.arguments)
        # Between attempts, it belongs to none: `processes_of` looks at the output.
        for number, output in outputs.items():
            os.dup2(output, number)
        requests.answer(ENDED, request.number, status)
    return 0


def _serve_after_imports(channel: str, modules: Sequence[str]) -> int:
    die_with_parent()
    # Before the environment is replaced: the library finds the place of the title through it.
    set_title("agent")
    with contextlib.redirect_stdout(sys.stderr):
        forking.prepare(modules)
    return serve(requests_of(channel))


def _variable(variable: str, otherwise: int) -> int:
    """Return a number that an operator sets on each node when it starts several nodes."""
    return int(os.environ.get(variable, otherwise))


if __name__ == "__main__":
    if sys.argv[1:2] == [SERVE]:
        sys.exit(_serve_after_imports(sys.argv[2], sys.argv[3:]))
    sys.exit(main(sys.argv[1:]))
