"""What agents are forked from: `python -m ...agent.template MODULE...`.

It imports the modules once, for all attempts of a run: an agent is then there at once, and so
are its ranks, each with a memory of its own. A request is a line of JSON on the standard input
with the agent's arguments, environment and log; its process id is the answer.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from steadytrain.components.shared.parent import die_with_parent
from steadytrain.components.train.agent import forking
from steadytrain.components.train.agent.__main__ import main as agent


def main(modules: Sequence[str]) -> int:
    """Imports, then forks an agent for each request until the input ends."""
    die_with_parent()
    # What an import prints is no answer.
    with contextlib.redirect_stdout(sys.stderr):
        forking.prepare(modules)
    for line in sys.stdin:
        request = json.loads(line)
        become = partial(_become, request["arguments"])
        # multiprocessing keeps it, and reaps it when the next one is started.
        print(forking.Forked(become, request["environment"], Path(request["log"])).pid, flush=True)
    return 0


def _become(arguments: Sequence[str]) -> int:
    # A session of its own: Ctrl-C on the terminal reaches the supervisor alone.
    os.setsid()
    return agent(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
