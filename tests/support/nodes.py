"""Several agents on this machine, each of which acts as the only one on its node."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence

from steadytrain.components.train.agent.processes import MARK, end_processes
from steadytrain.components.train.attempt import AttemptFolder
from steadytrain.components.train.launch.agent import AgentAttempt, AgentExit
from steadytrain.components.train.launch.process import RANK_PROGRAM

from support.ports import free_port


class NodesLauncher:
    """Starts an agent for each node, as an operator does: variables give each its node number."""

    def __init__(self, nodes: int, *, program: Sequence[str] = RANK_PROGRAM) -> None:
        self.nodes, self.program = nodes, program

    device = "cpu"
    host_memory = 2**34

    @property
    def world_size(self) -> int:
        return self.nodes

    @contextlib.contextmanager
    def start(self, folder: AttemptFolder) -> Iterator[AgentAttempt]:
        port = free_port()
        agents = [self._agent(folder, node, port) for node in range(self.nodes)]
        try:
            yield AgentAttempt(folder, gone=lambda node: _gone(agents[node]), nodes=self.nodes)
        finally:
            end_processes(folder.path)
            for agent in agents:
                agent.kill()
                agent.wait()

    def _agent(self, folder: AttemptFolder, node: int, port: int) -> subprocess.Popen[bytes]:
        told = {
            "PET_NNODES": str(self.nodes),
            "PET_NODE_RANK": str(node),
            "PET_MASTER_ADDR": "127.0.0.1",
            "PET_MASTER_PORT": str(port),
            MARK: str(folder.node(node).path),
        }
        command = [sys.executable, "-m", "steadytrain.components.train.agent", "--ranks=1"]
        return subprocess.Popen(
            [*command, "--threads=1", str(folder.path), *self.program],
            env={**os.environ, **told},
            start_new_session=True,
        )


def _gone(agent: subprocess.Popen[bytes]) -> AgentExit | None:
    status = agent.poll()
    return None if status is None else AgentExit(status)
