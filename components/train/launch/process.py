"""An agent as a process on this machine."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
from collections import deque
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

    Do nothing in a process that does not descend from a prepared one (`forking.possible`).
    """
    if not forking.possible():
        yield
        return
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
            threads = threads_of_each(self.world_size, self.compute.threads_per_rank)
            self._template = start_template(_TEMPLATE, self.imports, os.environ, threads, node.log)
        current = self._template
        environment = {**os.environ, MARK: str(folder.path)}
        agent = current.ask(self._arguments(folder), environment, node.log)
        try:
            yield AgentAttempt(folder, gone=lambda _: agent.exit())
        finally:
            if not agent.started:
                # The template may be about to fork.
                current.kill()
            end_processes(folder.path, root=agent.pid)

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


def start_template(
    program: str, imports: Sequence[str], environment: Mapping[str, str], threads: int, log: Path
) -> Template:
    """Start a template that imports everything first.

    Args:
        program: its module.
        threads: what torch computes with in the forked processes.
        log: file for its output, such as a failed import.
    """
    # Libraries read these when they are imported. The last two keep them from starting threads:
    # a process with several threads can't be forked.
    own = {
        "OMP_NUM_THREADS": str(threads),
        "OPENBLAS_NUM_THREADS": "1",
        "JE_ARROW_MALLOC_CONF": "background_thread:false",
    }
    with os.fdopen(open_log(log), "ab") as errors:
        # Its own session, so that Ctrl-C in the terminal reaches only this process.
        return Template(
            subprocess.Popen(
                [sys.executable, "-m", program, *imports],
                bufsize=0,
                env={**environment, **own},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
            )
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
    """The process that others are forked from.

    served: whether it has forked one.
    """

    def __init__(self, process: _Process) -> None:
        self._process, self.served = process, False
        self._unanswered = deque[Fork]()

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    @property
    def status(self) -> int | None:
        """The exit status; None while the template runs."""
        return self._process.poll()

    def ask(self, arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> Fork:
        """Request a process; return at once, though the template may still be importing."""
        fork = Fork(self)
        self._unanswered.append(fork)
        request = {"arguments": arguments, "environment": dict(environment), "log": str(log)}
        assert self._process.stdin is not None
        # If the template died meanwhile, `Fork.exit` notices that.
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        return fork

    def kill(self) -> None:
        """End the template; an agent dies with it."""
        self._process.kill()
        self.read_answers()
        self._process.communicate()
        self._unanswered.clear()

    def read_answers(self) -> None:
        """Read the process IDs that have arrived. They have the order of the requests."""
        output = self._process.stdout
        assert output is not None
        while self._unanswered and select.select([output], [], [], 0)[0]:
            if not (line := output.readline()):
                return
            # Native libraries may print while they are imported.
            if line.strip().isdigit():
                self._unanswered.popleft().found(int(line))
                self.served = True


class Fork:
    """A process that a template was asked for."""

    def __init__(self, template: Template) -> None:
        self._template, self._found = template, False
        self._process: psutil.Process | None = None

    def found(self, pid: int) -> None:
        """Receive the process ID."""
        self._found = True
        with contextlib.suppress(psutil.NoSuchProcess):
            self._process = psutil.Process(pid)

    @property
    def started(self) -> bool:
        """Whether the process has been forked; it may have ended since."""
        self._template.read_answers()
        return self._found

    @property
    def pid(self) -> int | None:
        """The process ID while the process runs."""
        process = self._process if self.started else None
        return process.pid if process and alive(process) else None

    def exit(self) -> AgentExit | None:
        """Return how the process ended, or that it will never start; None if neither."""
        if self.pid is not None:
            return None
        # An agent dies with the template, whose status is the only one known here.
        status = self._template.status
        return None if status is None and not self._found else AgentExit(status)
