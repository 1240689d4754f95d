"""Template that the steps of a local run are forked from: `python -m ...step_template --serve FD`.

It imports once what every step imports, MLflow above all, so that a step starts at once; see
`train/agent/fork_server.py`. If the requests end, the command that runs the steps has died, and the
template writes the report in its place. With the arguments STEP CONFIG, it is that step.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final

# Import nothing heavy here: processes that a step spawns import this module again.
if TYPE_CHECKING:
    from steadytrain.components.train.agent.fork_server import ForkServer, Requests

PROGRAM: Final = "steadytrain.pipelines.step_template"
_TRAIN: Final = "train"
CLOSING: Final = "report"
"""The step that runs last, whatever happened before it."""
_MODULES: Final = (
    "steadytrain.pipelines.steps",
    "steadytrain.components.preprocess.step",
    "steadytrain.components.train.step",
    "steadytrain.components.evaluate.step",
    "steadytrain.components.register.step",
    "steadytrain.components.report.step",
)
"""What the steps run."""


def main(arguments: Sequence[str]) -> None:
    """Be the template, or a step."""
    from steadytrain.components.train.agent.fork_server import SERVE

    if arguments[0] == SERVE:
        _serve(arguments[1])
    else:
        step, config = arguments
        _perform(step, config)


def _serve(channel: str) -> None:
    """Fork a step for each request. In a step, do that step's work."""
    from steadytrain.components.shared.processes import set_title
    from steadytrain.components.train.agent.fork_server import requests_of
    from steadytrain.components.train.agent.processes import MARK
    from steadytrain.components.train.launch.process import agent_forked_early

    # The command has marked this process with the run's folder.
    set_title(f"steps of {Path(os.environ[MARK]).name}")
    requests = requests_of(channel, forkable=_prepared())
    request = requests.fork_each(PROGRAM)
    if request is None:
        _close(requests)
        return
    # A step exits through the interpreter's own shutdown, like any program. One that trains forks
    # its agent now, because soon this process will have other threads, and cannot be forked then.
    step, config = request.arguments
    with agent_forked_early() if step == _TRAIN else nullcontext() as agent:
        _perform(step, config, agent)


def _close(requests: Requests) -> None:
    """Write the report in place of a dead command, once the running step has noticed the death."""
    requests.wait()
    last = requests.last
    if last is None:
        return
    step, config = last.arguments
    if step == CLOSING and requests.statuses.get(last.number) == 0:
        return
    os.environ.update(last.environment)
    if not requests.forkable:
        os.execv(sys.executable, [sys.executable, "-m", PROGRAM, CLOSING, config])
    _perform(CLOSING, config)


def _prepared() -> bool:
    """Import what steps need. Return whether a fork of this process is as good as a new process."""
    from steadytrain.components.train.agent.forking import (
        freeze,
        start_process,
        without_collection,
    )

    try:
        with without_collection():
            _import()
    except Exception as error:
        # A step gets the same error, and reports which store it is about.
        start_process("steps", error)
        return False
    return freeze("steps")


def _import() -> None:
    from steadytrain.components.shared.stage import quiet
    from steadytrain.components.shared.tracking.connect import import_mlflow

    quiet()
    import_mlflow()
    # Needed only for a database, and not installed in the light image.
    if find_spec("sqlalchemy") is not None:
        import_module("mlflow.store.tracking.sqlalchemy_store")
    for module in _MODULES:
        import_module(module)


def _perform(step: str, config: str, agent: ForkServer | None = None) -> None:
    from steadytrain.components.shared.config import load
    from steadytrain.components.shared.processes import set_title
    from steadytrain.pipelines.steps import perform

    given = load(Path(config))
    set_title(f"{step} of {given.run_id}")
    perform(step, given, agent)


if __name__ == "__main__":
    main(sys.argv[1:])
