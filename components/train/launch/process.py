"""An agent as a process on this machine."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Protocol, Self

import psutil

from steadytrain.components.shared.config import ComputeConfig
from steadytrain.components.shared.logs.output import open_log
from steadytrain.components.sizing.device import device_name
from steadytrain.components.train.agent import forking, template
from steadytrain.components.train.agent.memory import host_memory
from steadytrain.components.train.agent.processes import MARK, alive, end_processes
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
    "torch.distributed.run",
    # Almost everything that one model imports is also imported by the others.
    "transformers.models.llama.modeling_llama",
)
_TEMPLATE = "steadytrain.components.train.agent.template"


@contextlib.contextmanager
def template_forked_early() -> Iterator[None]:
    """Fork the template of this process's next launcher now, while there are no other threads.

    The process must descend from a prepared one (`forking.possible`).
    """
    _early.append(Template(_Fork()))
    try:
        yield
    finally:
        if (unused := _take_early()) is not None:
            unused.kill()


_early: list[Template] = []


def _take_early() -> Template | None:
    return _early.pop() if _early else None


class ProcessLauncher:
    """Starts an agent for the ranks of this machine, from a template that is kept for the next one.

    Use it as a context manager; the template ends with the context. In a process that descends
    from a prepared one, the template is forked and imports nothing (see `template_forked_early`).

    Args:
        program: command of a rank; the attempt's folder is appended to it.
        imports: modules that the template imports in advance.
    """

    def __init__(
        self,
        compute: ComputeConfig,
        program: Sequence[str] = RANK_PROGRAM,
        imports: Sequence[str] = RANK_IMPORTS,
    ) -> None:
        self.compute, self.program, self.imports = compute, tuple(program), tuple(imports)
        self._template: Template | None = None

    def __enter__(self) -> Self:
        self._template = _take_early()
        if self._template is None and forking.possible():
            # Now: soon this process will have other threads, and cannot be forked then.
            self._template = Template(_Fork())
        return self

    def __exit__(self, *_: object) -> None:
        if self._template is not None:
            self._template.kill()

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
        if self._template is None or not self._template.alive:
            self._template = Template(_program(self._command(), self._variables(), node.log))
        current = self._template
        current.ask(self._arguments(folder), {**os.environ, MARK: str(folder.path)}, node.log)
        try:
            yield AgentAttempt(folder, gone=lambda _: current.agent_gone())
        finally:
            current.end_agent(folder.path)

    def _command(self) -> list[str]:
        return [sys.executable, "-m", _TEMPLATE, *self.imports]

    def _variables(self) -> dict[str, str]:
        threads = threads_of_each(self.world_size, self.compute.threads_per_rank)
        # Libraries read these when they are imported. The last two keep them from starting threads:
        # a process with several threads can't be forked.
        own = {
            "OMP_NUM_THREADS": str(threads),
            "OPENBLAS_NUM_THREADS": "1",
            "JE_ARROW_MALLOC_CONF": "background_thread:false",
        }
        return {**os.environ, **own}

    def _arguments(self, folder: AttemptFolder) -> list[str]:
        threads = self.compute.threads_per_rank
        # Explicit, because this process may itself be on a node of another job.
        options = [f"--ranks={self.world_size}", "--nodes=1", "--node=0"]
        if threads:
            options.append(f"--threads={threads}")
        return [*options, str(folder.path), *self.program]


class _Process(Protocol):
    """A running template, as subprocess.Popen has it."""

    @property
    def stdin(self) -> IO[bytes] | None: ...

    @property
    def stdout(self) -> IO[bytes] | None: ...

    def poll(self) -> int | None: ...

    def kill(self) -> None: ...

    def communicate(self) -> object: ...


def _program(
    command: Sequence[str], environment: Mapping[str, str], log: Path
) -> subprocess.Popen[bytes]:
    """Start a template that imports everything first.

    Args:
        log: file for its output, such as a failed import.
    """
    with os.fdopen(open_log(log), "ab") as errors:
        # Its own session, so that Ctrl-C in the terminal reaches only the supervisor.
        return subprocess.Popen(
            command,
            bufsize=0,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            start_new_session=True,
        )


class _Fork:
    """A template forked from this process."""

    def __init__(self) -> None:
        requests, asking = os.pipe()
        answering, answers = os.pipe()
        self._process = forking.Forked(
            partial(template.forked, requests, answers), dict(os.environ)
        )
        os.close(requests)
        os.close(answers)
        self.stdin: IO[bytes] = os.fdopen(asking, "wb", buffering=0)
        self.stdout: IO[bytes] = os.fdopen(answering, "rb", buffering=0)

    def poll(self) -> int | None:
        return self._process.poll()

    def kill(self) -> None:
        self._process.kill()

    def communicate(self) -> None:
        """Close the pipes, and wait for the end of the process."""
        self.stdin.close()
        self.stdout.close()
        self._process.wait()


class Template:
    """The process that agents are forked from, and the most recently requested agent."""

    def __init__(self, process: _Process) -> None:
        self._process = process
        self._agent: psutil.Process | None = None

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        """Request an agent; return at once, though the template may still be importing."""
        self._agent = None
        request = {"arguments": arguments, "environment": dict(environment), "log": str(log)}
        assert self._process.stdin is not None
        # If the template died meanwhile, so did the agent; `agent_gone` notices that.
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()

    def agent_gone(self) -> AgentExit | None:
        """Return how the agent ended, or that it will never start; None if neither."""
        agent = self._answer()
        if agent is not None:
            # The agent dies with the template, whose status is the only one known here.
            return None if alive(agent) else AgentExit(self._process.poll())
        status = self._process.poll()
        return None if status is None else AgentExit(status)

    def end_agent(self, folder: Path) -> None:
        """End every process that belongs to an attempt's folder."""
        agent = self._answer()
        if agent is None:
            # The template may be about to fork.
            self.kill()
        end_processes(folder, root=agent.pid if agent and alive(agent) else None)

    def kill(self) -> None:
        """End the template; an agent dies with it."""
        self._process.kill()
        self._process.communicate()

    def _answer(self) -> psutil.Process | None:
        """Return the agent, if it has been forked."""
        output = self._process.stdout
        assert output is not None
        if self._agent is None and select.select([output], [], [], 0)[0]:
            line = output.readline()
            # Native libraries may print while they are imported.
            if line.strip().isdigit():
                with contextlib.suppress(psutil.NoSuchProcess):
                    self._agent = psutil.Process(int(line))
        return self._agent
