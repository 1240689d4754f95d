"""A process that others are forked from, on both sides: `template.main` and `start_template`.

It imports modules once for the trials of a study. They then start immediately, each with its own
memory. A request is a line of JSON on standard input with a trial's arguments, environment and log.
The answer is the trial's process ID.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import psutil

from steadytrain.components.shared.output_log import open_log
from steadytrain.components.shared.stopping import die_with_parent
from steadytrain.components.train.agent import forking
from steadytrain.components.train.agent.processes import alive

Program = Callable[[Sequence[str]], int]
"""What forks run: takes the arguments, and returns the exit status."""


def main(modules: Sequence[str], program: Program) -> int:
    """Import the modules, then fork a process for each request until the input ends."""
    die_with_parent()
    # Output of an import must not be mistaken for an answer.
    with contextlib.redirect_stdout(sys.stderr):
        forking.prepare(modules)
    for line in sys.stdin:
        request = json.loads(line)
        become = partial(_become, program, request["arguments"])
        # multiprocessing keeps a reference, and reaps the process when the next one starts.
        fork = forking.Forked(become, request["environment"], Path(request["log"]))
        print(fork.pid, flush=True)
    return 0


def _become(program: Program, arguments: Sequence[str]) -> int:
    # A separate session, so Ctrl-C in the terminal reaches only the driver.
    os.setsid()
    return program(arguments)


def start_template(
    program: str, imports: Sequence[str], environment: Mapping[str, str], threads: int, log: Path
) -> Template:
    """Start a template that imports everything first.

    Args:
        program: its module.
        threads: what torch computes with in the forked processes.
        log: file for its output, such as a failed import.
    """
    own = {**forking.SINGLE_THREADED, "OMP_NUM_THREADS": str(threads)}
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


class Template:
    """The process that others are forked from.

    served: whether it has forked one.
    """

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process, self.served = process, False
        self._unanswered = deque[Fork]()

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> Fork:
        """Request a process; return at once, though the template may still be importing."""
        fork = Fork(self)
        self._unanswered.append(fork)
        request = {"arguments": arguments, "environment": dict(environment), "log": str(log)}
        assert self._process.stdin is not None
        # If the template died meanwhile, `Fork.ended` notices that.
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        return fork

    def kill(self) -> None:
        """End the template."""
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

    def ended(self) -> bool:
        """Return whether the process has ended, or will never start."""
        return self.pid is None and (self._found or not self._template.alive)
