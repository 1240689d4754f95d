"""Template that the steps of a local run are forked from: `python -m ...step_template CHANNEL`.

It imports once what every step imports, MLflow above all, so that a step starts at once. A request
on the channel is a line of JSON with the step, the file with the run's configuration, and the
step's environment, and with modules to import while the step runs: torch is imported while the data
is prepared. Two descriptors come with it: the step's output and its lifeline. The answers are
lines: BEGUN with the step's process id, once the step leads its own session, and then STATUS with
its exit status. If the channel ends, the command that runs the steps has died, and the template
writes the report in its place.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

# Import nothing heavy here: processes that a step spawns import this module again.
from steadytrain.components.shared.stopping import VARIABLE

PROGRAM: Final = "steadytrain.pipelines.step_template"
BEGUN, STATUS = "begun", "status"
CLOSING: Final = "report"
"""The step that runs last, whatever happened before it."""
_MODULES: Final = (
    "steadytrain.pipelines.steps",
    "steadytrain.components.preprocess.step",
    "steadytrain.components.train.step",
    "steadytrain.components.evaluate.step",
    "steadytrain.components.register.step",
    "steadytrain.components.register.promote",
    "steadytrain.components.report.step",
)
"""What the steps run."""


def main(channel: int) -> int:
    """Fork a step for each request until the channel ends. In a step, do that step's work."""
    from steadytrain.components.shared.processes import set_title
    from steadytrain.components.train.agent.processes import MARK

    # The command has marked this process with the run's folder.
    set_title(f"steps of {Path(os.environ[MARK]).name}")
    prepared = _prepared()
    requests = socket.socket(fileno=channel)
    # Of the newest step, until the report is written.
    last: dict[str, Any] | None = None
    while (received := _receive(requests)) is not None:
        request, descriptors = received
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            os.setsid()
            _answer(requests, BEGUN, os.getpid())
            requests.close()
            # A step exits through the interpreter's own shutdown, like any program.
            return _be_step(request, descriptors, prepared)
        for descriptor in descriptors:
            os.close(descriptor)
        step = _Step(pid, requests)
        if prepared and request["imports"]:
            prepared = step.import_meanwhile(request["imports"])
        status = step.wait()
        last = None if request["step"] == CLOSING and status == 0 else request
    if last is not None:
        _close(last, prepared)
    return 0


class _StepFailed(BaseException):
    """Ends the imports while a step runs: no other step needs them."""


class _Step:
    """A running step. Its end is reported as soon as it is seen."""

    def __init__(self, pid: int, requests: socket.socket) -> None:
        self._pid, self._requests = pid, requests
        self._status: int | None = None
        self._importing = False

    def wait(self) -> int:
        """Return its exit status once it has ended."""
        while self._status is None:
            self._look(0)
        return self._status

    def import_meanwhile(self, modules: Iterable[str]) -> bool:
        """Import modules until the step fails. Return whether a fork is still as good."""
        from steadytrain.components.train.agent import forking

        failed, self._importing = None, True
        signal.signal(signal.SIGCHLD, self._stop_imports)
        try:
            # It may have ended before.
            self._stop_imports()
            try:
                forking.prepare(modules)
            except Exception as error:
                failed = error
            self._importing = False
        except _StepFailed:
            return True
        finally:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        if failed is not None:
            # The training process gets the same error, and reports it.
            forking.start_process("ranks", failed)
            return forking.freeze("steps")
        return forking.possible()

    def _stop_imports(self, *_: object) -> None:
        self._look(os.WNOHANG)
        if self._status and self._importing:
            self._importing = False
            raise _StepFailed

    def _look(self, options: int) -> None:
        if self._status is not None:
            return
        # The signal may interrupt this very function, after it has learned of the end.
        with contextlib.suppress(ChildProcessError):
            pid, status = os.waitpid(self._pid, options)
            if pid:
                self._status = os.waitstatus_to_exitcode(status)
                _answer(self._requests, STATUS, self._status)


def _close(last: Mapping[str, Any], prepared: bool) -> None:
    """Write the report in place of a dead command, once the running step has noticed the death."""
    with contextlib.suppress(ChildProcessError):
        while True:
            os.wait()
    os.environ.update(last["environment"])
    _run(CLOSING, last["config"], prepared)


def _receive(requests: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Return the next request and the descriptors with it, or None once the channel ends."""
    # A command that dies before it reads an answer resets the connection.
    with contextlib.suppress(ConnectionError):
        _, descriptors, _, _ = socket.recv_fds(requests, 1, 2)
        with requests.makefile("rb") as lines:
            if line := lines.readline():
                return json.loads(line), descriptors
    return None


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


def _answer(requests: socket.socket, kind: str, number: int) -> None:
    with contextlib.suppress(ConnectionError):
        requests.sendall(f"{kind} {number}\n".encode())


def _be_step(request: Mapping[str, Any], descriptors: Sequence[int], prepared: bool) -> int:
    from steadytrain.components.train.launch.process import agent_forked_early

    _become(request["environment"], *descriptors)
    # Now, because soon this process will have other threads, and cannot be forked then.
    with agent_forked_early():
        _run(request["step"], request["config"], prepared)
    return 0


def _become(environment: Mapping[str, str], output: int, line: int) -> None:
    os.dup2(output, sys.stdout.fileno())
    os.dup2(output, sys.stderr.fileno())
    os.close(output)
    os.environ.clear()
    os.environ.update(environment)
    os.environ[VARIABLE] = str(line)


def _run(step: str, config: str, prepared: bool) -> None:
    """Run a step in this process, or in a new one if a fork is not as good."""
    if not prepared:
        os.execv(sys.executable, [sys.executable, "-m", PROGRAM, step, config])
    # Look again: the folder that was found when this process started may have been removed.
    tempfile.tempdir = None
    _perform(step, config)


def _perform(step: str, config: str) -> None:
    from steadytrain.components.shared.config import load
    from steadytrain.components.shared.processes import set_title
    from steadytrain.pipelines.steps import perform

    given = load(Path(config))
    set_title(f"{step} of {given.run_id}")
    perform(step, given)


if __name__ == "__main__":
    if len(sys.argv) > 2:
        _perform(*sys.argv[1:])
    else:
        sys.exit(main(int(sys.argv[1])))
