"""The agent of this machine."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, Self

from steadytrain.components.shared.config import ComputeConfig
from steadytrain.components.shared.errors import Unkillable
from steadytrain.components.shared.output_log import open_log
from steadytrain.components.shared.processes import host_memory
from steadytrain.components.sizing.hardware import device_name
from steadytrain.components.train.agent import forking
from steadytrain.components.train.agent.__main__ import serve
from steadytrain.components.train.agent.fork_server import ForkServer, Served
from steadytrain.components.train.agent.processes import MARK, end_processes, unreaped
from steadytrain.components.train.agent.ranks import threads_of_each
from steadytrain.components.train.attempt import AttemptFolder
from steadytrain.components.train.launch.agent import AgentAttempt, AgentExit

RANK_PROGRAM = (sys.executable, "-m", "steadytrain.components.train.loop.main")
RANK_IMPORTS = (
    "steadytrain.components.shared.config",
    "steadytrain.components.tasks.built_in",
    "steadytrain.components.tasks.causal_lm",
    "steadytrain.components.tasks.fused_head",
    "steadytrain.components.train.loop.process",
    "steadytrain.components.train.loop.training",
    "steadytrain.components.train.strategy.replicated",
    # Almost everything that one model imports is also imported by the others.
    "transformers.models.llama.modeling_llama",
)
_AGENT: Final = "steadytrain.components.train.agent"
_IDLE_SECONDS = 5.0
"""How long an agent may take from its report to the end of the attempt."""


@contextlib.contextmanager
def agent_forked_early() -> Iterator[ForkServer | None]:
    """Fork an agent now, while this process has no other threads. It ends with the context.

    Yield None in a process that does not descend from a prepared one (`forking.possible`).
    """
    if not forking.possible():
        yield None
        return
    agent = ForkServer.fork(serve)
    try:
        yield agent
    finally:
        agent.kill()


class ProcessLauncher:
    """Starts the ranks of this machine through an agent, which is kept for the next attempt.

    Use it as a context manager; the agent ends with the context.

    Args:
        program: command of a rank; the attempt's folder is appended to it.
        imports: modules that the agent imports in advance.
        agent: the first one, if it was forked before (see `agent_forked_early`). It imports
            nothing.
    """

    def __init__(
        self,
        compute: ComputeConfig,
        program: Sequence[str] = RANK_PROGRAM,
        imports: Sequence[str] = RANK_IMPORTS,
        agent: ForkServer | None = None,
    ) -> None:
        self.compute, self.program, self.imports = compute, tuple(program), tuple(imports)
        self._agent = agent

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._agent is not None:
            self._agent.kill()

    @property
    def world_size(self) -> int:
        return self.compute.nproc_per_node

    @property
    def device(self) -> str:
        return device_name(self.compute)

    @property
    def host_memory(self) -> int:
        return host_memory()

    @contextlib.contextmanager
    def start(self, folder: AttemptFolder) -> Iterator[AgentAttempt]:
        node = folder.node(0)
        node.path.mkdir(parents=True, exist_ok=True)
        if self._agent is None or not self._agent.alive:
            self._agent = self._new_agent(node.log)
        agent = self._agent
        served = agent.request(
            self._arguments(folder),
            {**os.environ, **self.compute.nccl, MARK: str(folder.path)},
            node.log,
        )
        try:
            yield AgentAttempt(folder, gone=lambda _: _exit(agent))
        finally:
            _finish(agent, served, folder)

    def _new_agent(self, log: Path) -> ForkServer:
        """Start an agent as a new program.

        Args:
            log: file for the output of its imports, such as the error of one that fails.
        """
        threads = threads_of_each(self.world_size, self.compute.threads_per_rank)
        with os.fdopen(open_log(log), "ab") as errors:
            return ForkServer.start(
                _AGENT,
                self.imports,
                environment={**os.environ, "OMP_NUM_THREADS": str(threads)},
                output=subprocess.DEVNULL,
                errors=errors.fileno(),
            )

    def _arguments(self, folder: AttemptFolder) -> list[str]:
        threads = self.compute.threads_per_rank
        # Explicit, because this process may itself be on a node of another job.
        options = [f"--ranks={self.world_size}", "--nodes=1", "--node=0"]
        if threads:
            options.append(f"--threads={threads}")
        return [*options, str(folder.path), *self.program]


def _exit(agent: ForkServer) -> AgentExit | None:
    """Return how an agent ended; None if it has not."""
    status = agent.process.poll()
    return None if status is None else AgentExit(status)


def _finish(agent: ForkServer, served: Served, folder: AttemptFolder) -> None:
    """End every process of an attempt. Only an agent that is done with it stays.

    Raises:
        Unkillable: a process does not end.
    """
    reported = folder.node(0).exits.is_file()
    done = served.wait(_IDLE_SECONDS if reported else 0.0) is not None
    try:
        end_processes(folder.path, root=None if done else unreaped(agent.process))
    except Unkillable:
        agent.abandon()
        raise
