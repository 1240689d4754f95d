"""Turn this process into a rank: `python -m ...agent.rank FOLDER COMMAND...`.

Its output goes to the attempt's folder. It dies with its parent, so a launcher that is killed
without warning leaves no rank behind.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from steadytrain.components.shared.redaction import traceback_of
from steadytrain.components.shared.stopping import die_with_parent
from steadytrain.components.train.agent import forking
from steadytrain.components.train.attempt import AttemptFolder


def main(folder: str, *command: str) -> int:
    """Redirect the output, then turn this process into `command`."""
    die_with_parent()
    forking.write_to(AttemptFolder(Path(folder)).log(int(os.environ.get("RANK", "0"))))
    if not forking.possible() or command[0] != sys.executable:
        os.execv(command[0], command)
    return _run(command[1:])


def _run(program: Sequence[str]) -> int:
    """Do what Python does with these arguments, but use the modules that are already imported."""
    _use_threads()
    is_module = program[0] == "-m"
    sys.argv = list(program[1:] if is_module else program)
    try:
        if is_module:
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(sys.argv[0], run_name="__main__")
    except Exception as error:
        # Print it here. Otherwise it would end up in the log of the process that forked this one.
        print(traceback_of(error), end="", file=sys.stderr)
        return 1
    return 0


def _use_threads() -> None:
    """Let torch use as many threads as a new process would: it has read the variable already."""
    if "torch" in sys.modules and "OMP_NUM_THREADS" in os.environ:
        sys.modules["torch"].set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
