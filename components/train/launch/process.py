"""The agent of this machine."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Self

from steadytrain.components.shared.config import ComputeConfig
from steadytrain.components.shared.errors import Unkillable
from steadytrain.components.shared.output_log import open_log
from steadytrain.components.sizing.device import device_name
from steadytrain.components.train.agent import forking, warm
from steadytrain.components.train.agent.memory import host_memory
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
_IDLE_SECONDS = 5.0
"""How long an agent may take from its report to the end of the attempt."""


@contextlib.contextmanager
def agent_forked_early() -> Iterator[None]:
    """Fork the agent of this process's next launcher now, while there are no other threads.

    Do nothing in a process that does not descend from a prepared one (`forking.possible`).
    """
    if not forking.possible():
        yield
        return
    _early.append(LocalAgent(_fork))
    try:
        yield
    finally:
        if (unused := _take_early()) is not None:
            unused.kill()


_early: list[LocalAgent] = []


def _take_early() -> LocalAgent | None:
    return _early.pop() if _early else None


class ProcessLauncher:
    """Starts the ranks of this machine through an agent, which is kept for the next attempt.

    Use it as a context manager; the agent ends with the context. In a process that descends from a
    prepared one, it may have been forked before, and imports nothing (see `agent_forked_early`).

    Args:
        program: command of a rank; the attempt's folder is appended to it.
        imports: modules that the agent imports in advance.
    """

    def __init__(
        self,
        compute: ComputeConfig,
        program: Sequence[str] = RANK_PROGRAM,
        imports: Sequence[str] = RANK_IMPORTS,
    ) -> None:
        self.compute, self.program, self.imports = compute, tuple(program), tuple(imports)
        self._agent: LocalAgent | None = None

    def __enter__(self) -> Self:
        self._agent = _take_early()
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
            self._agent = LocalAgent(partial(self._program, node.log))
        agent = self._agent
        agent.ask(self._arguments(folder), {**os.environ, MARK: str(folder.path)}, node.log)
        try:
            yield AgentAttempt(folder, gone=lambda _: agent.gone())
        finally:
            # One that does not end is not awaited either.
            self._agent = None
            agent.finish(folder)
            self._agent = agent

    def _program(self, log: Path, requests: int, answers: int) -> subprocess.Popen[bytes]:
        """Start an agent as a new program.

        Args:
            log: file for the output of its imports, such as the error of one that fails.
        """
        with os.fdopen(open_log(log), "ab") as output:
            # Its own session, so that Ctrl-C in the terminal reaches only the supervisor.
            return subprocess.Popen(
                self._command(requests, answers),
                env=self._variables(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=output,
                pass_fds=(requests, answers),
                start_new_session=True,
            )

    def _command(self, requests: int, answers: int) -> list[str]:
        return [sys.executable, "-m", warm.__name__, str(requests), str(answers), *self.imports]

    def _variables(self) -> dict[str, str]:
        threads = threads_of_each(self.world_size, self.compute.threads_per_rank)
        return {**os.environ, **forking.SINGLE_THREADED, "OMP_NUM_THREADS": str(threads)}

    def _arguments(self, folder: AttemptFolder) -> list[str]:
        threads = self.compute.threads_per_rank
        # Explicit, because this process may itself be on a node of another job.
        options = [f"--ranks={self.world_size}", "--nodes=1", "--node=0"]
        if threads:
            options.append(f"--threads={threads}")
        return [*options, str(folder.path), *self.program]


def _fork(requests: int, answers: int) -> forking.Forked:
    return forking.Forked(partial(warm.forked, requests, answers), dict(os.environ))


class LocalAgent:
    """An agent on this machine, which serves one attempt after another.

    Args:
        start: starts it with the descriptors of its requests and its answers.
    """

    def __init__(
        self, start: Callable[[int, int], subprocess.Popen[bytes] | forking.Forked]
    ) -> None:
        requests, self._requests = os.pipe()
        self._answers, answers = os.pipe()
        self._process = start(requests, answers)
        os.close(requests)
        os.close(answers)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        """Request an attempt; return at once, though the agent may still be importing."""
        request = {"arguments": arguments, "environment": dict(environment), "log": str(log)}
        # If the agent died meanwhile, `gone` notices that.
        with contextlib.suppress(BrokenPipeError):
            os.write(self._requests, json.dumps(request).encode() + b"\n")

    def gone(self) -> AgentExit | None:
        """Return how the agent ended; None if it has not."""
        status = self._process.poll()
        return None if status is None else AgentExit(status)

    def finish(self, folder: AttemptFolder) -> None:
        """End every process of an attempt. Only an agent that is done with it stays.

        Raises:
            Unkillable: a process does not end.
        """
        reported = folder.node(0).exits.is_file()
        idle = self._idle(_IDLE_SECONDS if reported else 0.0)
        try:
            end_processes(folder.path, root=None if idle else unreaped(self._process))
        except Unkillable:
            if isinstance(self._process, forking.Forked):
                self._process.abandon()
            raise

    def kill(self) -> None:
        """End the agent; its ranks die with it."""
        self._process.kill()
        self._process.wait()
        os.close(self._requests)
        os.close(self._answers)

    def _idle(self, seconds: float) -> bool:
        """Return whether the agent is done with its attempt within some seconds."""
        end = time.monotonic() + seconds
        while self.alive:
            if select.select([self._answers], [], [], 0.02)[0]:
                return bool(os.read(self._answers, 1))
            if time.monotonic() > end:
                return False
        return False
