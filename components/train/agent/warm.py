"""An agent for all attempts of a run: `python -m ...agent.warm IN OUT MODULE...`.

It imports the modules once. The ranks of each attempt then start immediately, as forks of it.
A request is a line of JSON with an agent's arguments, environment and log. The answer is an empty
line, once the attempt is over. IN and OUT are the descriptors of both. In a process that descends
from a prepared one, this agent is a fork instead of a program.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from steadytrain.components.shared.processes import set_title
from steadytrain.components.shared.stopping import die_with_parent
from steadytrain.components.train.agent import forking
from steadytrain.components.train.agent.__main__ import main as run_attempt


def main(requests: int, answers: int, modules: Sequence[str]) -> int:
    """Import the modules, then serve until the requests end."""
    die_with_parent()
    # Before the environment is replaced: the library finds the place of the title through it.
    set_title("agent")
    with contextlib.redirect_stdout(sys.stderr):
        forking.prepare(modules)
    return _serve(requests, answers)


def forked(requests: int, answers: int) -> int:
    """Do the same in a fork of a prepared process."""
    die_with_parent()
    # Its own session, so that Ctrl-C in the terminal reaches only the supervisor.
    os.setsid()
    return _serve(requests, answers)


def _serve(requests: int, answers: int) -> int:
    outputs = {number: os.dup(number) for number in (1, 2)}
    with os.fdopen(requests) as lines:
        for line in lines:
            request = json.loads(line)
            os.environ.clear()
            os.environ.update(request["environment"])
            forking.write_to(Path(request["log"]))
            run_attempt(request["arguments"])
            # Between attempts, it belongs to none: `processes_of` looks at the output.
            for number, output in outputs.items():
                os.dup2(output, number)
            os.write(answers, b"\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]))
