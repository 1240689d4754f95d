"""Template that the steps of a local run are forked from: `python -m ...step_template CHANNEL`.

It imports once what every step imports, MLflow above all, so that a step starts at once. A request
on the channel is a line of JSON with the step's command and environment. Two descriptors come with
it: the step's output and its lifeline. The answers are lines: BEGUN with the step's process id,
once the step leads its own session, and then STATUS with its exit status.

Another request is for a second template, a fork of this one that imports torch while the data is
prepared. One descriptor comes with it: the second template's channel. The only answer is BEGUN.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

# Import nothing heavy here: processes that a step spawns import this module again.
from steadytrain.components.shared.lifeline import VARIABLE

EXECUTOR = "kfp.dsl.executor_main"
BEGUN, STATUS = "begun", "status"
_STEPS = ("preprocess", "train", "evaluate", "register", "report")


def main(channel: int) -> int:
    """Fork a step for each request until the channel ends. In a step, do that step's work."""
    from steadytrain.components.shared.lifeline import die_with_parent

    die_with_parent()
    prepared = _prepared()
    requests = socket.socket(fileno=channel)
    while (received := _receive(requests)) is not None:
        request, descriptors = received
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0 and "imports" in request:
            die_with_parent()
            requests.close()
            requests = socket.socket(fileno=descriptors[0])
            if not (prepared and _import_more(request["imports"])):
                return 1
            continue
        if pid == 0:
            os.setsid()
            _answer(requests, BEGUN, os.getpid())
            requests.close()
            # A step exits through the interpreter's own shutdown, like any program.
            return _be_step(request, descriptors, prepared)
        for descriptor in descriptors:
            os.close(descriptor)
        if "imports" in request:
            _answer(requests, BEGUN, pid)
        else:
            _answer(requests, STATUS, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    return 0


def _receive(requests: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Return the next request and the descriptors with it, or None once the channel ends."""
    _, descriptors, _, _ = socket.recv_fds(requests, 1, 2)
    with requests.makefile("rb") as lines:
        line = lines.readline()
    return (json.loads(line), descriptors) if line else None


def _prepared() -> bool:
    """Import what steps need. Return whether a fork of this process is as good as a new process."""
    from steadytrain.components.train.agent.forking import freeze, start_process

    try:
        _import()
    except Exception as error:
        # A step gets the same error, and reports which store it is about.
        start_process("steps", error)
        return False
    return freeze("steps")


def _import_more(modules: Iterable[str]) -> bool:
    """Import what training needs too. Return whether a fork is still as good as a new process."""
    from steadytrain.components.train.agent import forking

    try:
        forking.prepare(modules)
    except Exception as error:
        # The training process gets the same error, and reports it.
        forking.start_process("ranks", error)
    return forking.possible()


def _import() -> None:
    from steadytrain.components.shared.stage import quiet
    from steadytrain.components.shared.tracking.connect import import_mlflow

    quiet()
    import_mlflow()
    # Needed only for a database, and not installed in the light image.
    if find_spec("sqlalchemy") is not None:
        import_module("mlflow.store.tracking.sqlalchemy_store")
    for step in _STEPS:
        import_module(f"steadytrain.components.{step}.artifacts")
    import_module(EXECUTOR)


def _answer(requests: socket.socket, kind: str, number: int) -> None:
    requests.sendall(f"{kind} {number}\n".encode())


def _be_step(request: Mapping[str, Any], descriptors: Sequence[int], prepared: bool) -> int:
    from steadytrain.components.train.agent import forking

    _become(request["environment"], *descriptors)
    if forking.possible():
        from steadytrain.components.train.launch.process import template_forked_early

        # Now, because soon this process will have other threads, and cannot be forked then.
        with template_forked_early():
            _run(request["command"], prepared)
    else:
        _run(request["command"], prepared)
    return 0


def _become(environment: Mapping[str, str], output: int, line: int) -> None:
    os.dup2(output, sys.stdout.fileno())
    os.dup2(output, sys.stderr.fileno())
    os.close(output)
    os.environ.clear()
    os.environ.update(environment)
    os.environ[VARIABLE] = str(line)


def _run(command: list[str], prepared: bool) -> None:
    """Run KFP's command for a step.

    Runs it in this process if it has the usual form and the imports worked, or else by exec.
    """
    usual = tuple(command[:2]) == ("sh", "-ec") and EXECUTOR in command[2]
    if not (usual and prepared):
        os.execvp(command[0], command)
    executor: Any = import_module(EXECUTOR)
    source, *arguments = command[3:]
    # Look again: the folder that was found when this process started may have been removed.
    tempfile.tempdir = None
    with tempfile.TemporaryDirectory() as folder:
        module = Path(folder) / "ephemeral_component.py"
        module.write_text(source, encoding="utf-8")
        sys.argv = [EXECUTOR, "--component_module_path", str(module), *arguments]
        executor.executor_main()


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
