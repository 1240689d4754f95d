"""The process that agents are forked from: `python -m ...agent.template MODULE...`.

It imports the modules once for all attempts of a run. Agents and their ranks then start
immediately, each with its own memory. A request is a line of JSON on standard input with the
agent's arguments, environment and log. The answer is the agent's process ID. In a process that
descends from a prepared one, the template is a fork instead of a program. The trials of a study are
forked from such a template, too.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import IO

from steadytrain.components.shared.lifeline import die_with_parent
from steadytrain.components.train.agent import forking
from steadytrain.components.train.agent.__main__ import main as agent

Program = Callable[[Sequence[str]], int]
"""What forks run: takes the arguments, and returns the exit status."""


def main(modules: Sequence[str], program: Program = agent) -> int:
    """Import the modules, then fork a process for each request until the input ends."""
    die_with_parent()
    # Output of an import must not be mistaken for an answer.
    with contextlib.redirect_stdout(sys.stderr):
        forking.prepare(modules)
    return _serve(sys.stdin, sys.stdout, program)


def forked(requests: int, answers: int) -> int:
    """Do the same in a fork of a prepared process. The arguments are descriptors."""
    die_with_parent()
    # Its own session, so that Ctrl-C in the terminal reaches only the supervisor.
    os.setsid()
    with os.fdopen(requests) as lines, os.fdopen(answers, "w") as output:
        return _serve(lines, output, agent)


def _serve(requests: Iterable[str], answers: IO[str], program: Program) -> int:
    for line in requests:
        request = json.loads(line)
        become = partial(_become, program, request["arguments"])
        # multiprocessing keeps a reference, and reaps the process when the next one starts.
        fork = forking.Forked(become, request["environment"], Path(request["log"]))
        print(fork.pid, file=answers, flush=True)
    return 0


def _become(program: Program, arguments: Sequence[str]) -> int:
    # A separate session, so Ctrl-C in the terminal reaches only the supervisor.
    os.setsid()
    return program(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
