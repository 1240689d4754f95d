"""The processes of the steps that kfp.local executes: started, stopped, and cleared away."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import IO

from steadytrain.components.report.story import executions
from steadytrain.components.shared.errors import StorageError
from steadytrain.components.shared.events import read_events
from steadytrain.components.shared.events.types import StepFailed
from steadytrain.components.shared.lifeline import VARIABLE, Lifeline
from steadytrain.components.shared.storage import LocalStorage
from steadytrain.components.shared.workspace import Workspace
from steadytrain.components.train.agent.processes import MARK, end_processes
from steadytrain.components.train.lease import held

_FUNCTION = "--function_to_execute"
_EXIT_HANDLER = "report"
_NOT_STARTED = 128 + signal.SIGTERM
_REMEDY = "the same command continues the run from what is done"


class StepProcesses:
    """Runs one step at a time, in place of kfp.local's own function.

    A step holds to this process by a lifeline: cutting it stops the step at work and any that
    begins too late to be seen here, and so does the death of this process. The exit handler
    has one of its own, which is cut by that death alone.

    Args:
        workspace: of the run, whose events tell of a step that was killed.
        also_hold: descriptors that every step inherits.
    """

    def __init__(self, workspace: Workspace, also_hold: Sequence[int] = ()) -> None:
        self._workspace, self._also_hold = workspace, tuple(also_hold)
        self._steps, self._closing = Lifeline(), Lifeline()
        self._process: subprocess.Popen[str] | None = None
        self._stopped = self._urgent = False

    def run(self, full_command: list[str], env_vars: Mapping[str, str] | None = None) -> int:
        """Runs a step to its end, with its output as this process's; returns its exit status."""
        name = full_command[full_command.index(_FUNCTION) + 1]
        closing = name == _EXIT_HANDLER
        if self._stopped and not closing:
            return _NOT_STARTED
        began = time.time()
        line = (self._closing if closing else self._steps).descriptor
        own = {VARIABLE: str(line), MARK: str(self._workspace.folder)}
        with subprocess.Popen(
            full_command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            bufsize=1,
            env={**os.environ, **(env_vars or {}), **own},
            pass_fds=(line, *self._also_hold),
            # A group of its own, so that it can be ended with the shell around it.
            start_new_session=True,
        ) as process:
            if not closing:
                self._process = process
            if self._urgent:
                self.end_now()
            shown = threading.Thread(target=_show, args=(process.stdout,), daemon=True)
            shown.start()
            status = process.wait()
            self._process = None
            # What a step leaves would hold its output open, and this process with it.
            end_processes(self._workspace.folder)
            shown.join()
        if status and not self._taken_over():
            self._tell(name, status, began)
        return status

    def stop(self) -> None:
        """Stops the step at work, and lets no other begin but the exit handler."""
        self._stopped = True
        self._steps.cut()

    def end_now(self) -> None:
        """Kills the step at work; the exit handler is left its time."""
        self._urgent = True
        self.stop()
        process = self._process
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

    def close(self) -> None:
        """Leaves no process behind."""
        end_processes(self._workspace.folder)

    def _taken_over(self) -> bool:
        """Whether another supervisor trains the run, and is the one to tell of it."""
        with contextlib.suppress(StorageError):
            return held(LocalStorage(self._workspace.lease))
        return False

    def _tell(self, name: str, status: int, began: float) -> None:
        """Tells of a step that could not tell itself how it ended."""
        told = [event for event in read_events(self._workspace.events) if event.time >= began]
        if any(isinstance(event, StepFailed) for event in told):
            return
        begun = [item.stage for item in executions(told) if item.state == "unfinished"]
        if self._stopped and not begun:
            return
        failed = died([name, *begun][-1], status)
        if self._stopped:
            failed = replace(failed, error="Stopped", message="killed, on request")
        with contextlib.closing(self._workspace.stream("pipeline")) as stream:
            stream.emit(failed)


def died(stage: str, status: int) -> StepFailed:
    """What there is to tell of a process that ended without a word of its own."""
    return StepFailed(stage=stage, error="Died", message=_how(status), remedy=_REMEDY)


def _show(output: IO[str]) -> None:
    for text in output:
        # A full disk ends the log, not the step.
        with contextlib.suppress(OSError):
            print(text, end="", flush=True)


def _how(status: int) -> str:
    number = -status if status < 0 else status - 128
    try:
        killed = signal.Signals(number).name
    except ValueError:
        return f"ended with exit status {status} and no word of its own; its output is in the log"
    memory = ", which the kernel sends when memory runs out" if killed == "SIGKILL" else ""
    return f"killed by {killed}{memory}"
