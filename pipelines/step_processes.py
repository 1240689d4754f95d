"""The processes of the steps that kfp.local runs: start, stop, and clean up."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO

from steadytrain.components.report.story import executions
from steadytrain.components.shared.errors import StorageError, Unkillable
from steadytrain.components.shared.events import Cursor, Event
from steadytrain.components.shared.events.types import StepFailed
from steadytrain.components.shared.lease import held
from steadytrain.components.shared.lifeline import Lifeline
from steadytrain.components.shared.redaction import redact
from steadytrain.components.shared.storage import LocalStorage
from steadytrain.components.shared.workspace import Workspace
from steadytrain.components.train.agent.processes import KILL_SECONDS, MARK, end_processes
from steadytrain.components.train.launch.process import RANK_IMPORTS
from steadytrain.pipelines.step_forks import StepTemplate
from steadytrain.pipelines.unexpected import memory_limit

_FUNCTION = "--function_to_execute"
_EXIT_HANDLER = "report"
_BEFORE_TRAINING = "preprocess"
_WITH_TORCH = ("train", "evaluate", "register")
_OUTPUT_SECONDS = 5.0
_NOT_STARTED = 128 + signal.SIGTERM
_REMEDY = "the same command continues the run where it stopped"


class StepProcesses:
    """Runs one step at a time, in place of kfp.local's own function.

    A lifeline ties each step to this process. If the lifeline is cut or this process dies, the
    running step stops, and so does any step that starts too late to be seen here. The exit handler
    has its own lifeline, which only the death of this process cuts.

    Args:
        workspace: the run's; a step that was killed is recorded in its events.
        also_hold: descriptors that every step inherits.
        trains: whether to import what training needs while the data is prepared.
    """

    def __init__(
        self, workspace: Workspace, also_hold: Sequence[int] = (), *, trains: bool = False
    ) -> None:
        self._workspace, self._also_hold = workspace, tuple(also_hold)
        self._steps, self._closing = Lifeline(), Lifeline()
        self._template = StepTemplate.start(workspace.folder, self._also_hold)
        self._trains = trains
        self._heavy: StepTemplate | None = None
        self._step: int | None = None
        self._stopped = self._urgent = False
        self._unkillable: list[int] = []

    def run(self, full_command: list[str], env_vars: Mapping[str, str] | None = None) -> int:
        """Run a step to its end, print its output, and return its exit status."""
        name = full_command[full_command.index(_FUNCTION) + 1]
        closing = name == _EXIT_HANDLER
        if self._stopped and not closing:
            return _NOT_STARTED
        # By position, because the clock may be set while the step runs.
        news = Cursor(self._workspace.events)
        news.skip_to_end()
        template = self._template_for(name)
        line = (self._closing if closing else self._steps).descriptor
        environment = {**os.environ, **(env_vars or {}), MARK: str(self._workspace.folder)}
        with template.fork(full_command, environment, line) as (step, output):
            if not closing:
                self._step = step
            if self._urgent:
                self.end_now()
            shown = threading.Thread(target=_show, args=(output,), daemon=True)
            shown.start()
            status = template.status()
            self._step = None
            # Processes that a step leaves behind would keep its output open, and block this
            # process.
            status = self._end_leftovers(name) or status
            shown.join(None if not self._unkillable else _OUTPUT_SECONDS)
            if shown.is_alive():
                # It would block this process, too. The command still ends what is left.
                os._exit(1)
        if status and not self._taken_over():
            before = list(news.place)
            self._tell(name, status, news.new(), [news.folder / file for file in before])
        return status

    def stop(self) -> None:
        """Stop the running step, and start no other step except the exit handler."""
        self._stopped = True
        self._steps.cut()

    def end_now(self) -> None:
        """Kill the running step. The exit handler still gets its time."""
        self._urgent = True
        self.stop()
        if self._step is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._step, signal.SIGKILL)
            # This process waits for the step, which may not end.
            late = threading.Timer(KILL_SECONDS, self._give_up, [self._step])
            late.daemon = True
            late.start()

    def _give_up(self, step: int) -> None:
        """End this process if a killed step still runs. The command reports what does not end."""
        if self._step == step:
            os._exit(1)

    def close(self) -> None:
        """End all processes, so that none is left behind."""
        if self._heavy is not None:
            self._heavy.kill()
        self._template.kill()
        end_processes(self._workspace.folder, spared=self._unkillable)

    def _template_for(self, name: str) -> StepTemplate:
        if not self._template.alive:
            self._template = StepTemplate.start(self._workspace.folder, self._also_hold)
        if name == _BEFORE_TRAINING and self._trains:
            self._heavy = self._template.with_imports(RANK_IMPORTS)
        if name in _WITH_TORCH and self._heavy is not None and self._heavy.alive:
            return self._heavy
        return self._template

    def _templates(self) -> list[int]:
        return [item.pid for item in (self._template, self._heavy) if item is not None]

    def _taken_over(self) -> bool:
        """Return whether another supervisor trains the run, and so will report on it."""
        with contextlib.suppress(StorageError):
            return held(LocalStorage(self._workspace.lease))
        return False

    def _end_leftovers(self, name: str) -> int:
        """End what a step left behind. Return 1, and report it, if that cannot be killed."""
        spared = [*self._templates(), *self._unkillable]
        try:
            end_processes(self._workspace.folder, spared=spared)
        except Unkillable as error:
            self._unkillable += error.pids
            failed = StepFailed(
                stage=name, error="Unkillable", message=error.message, remedy=error.remedy
            )
            with contextlib.closing(self._workspace.stream("pipeline")) as stream:
                stream.emit(failed)
            return 1
        return 0

    def _tell(self, name: str, status: int, events: Sequence[Event], files: Sequence[Path]) -> None:
        """Record how a step ended if it could not do so itself.

        Args:
            events: what the step and its processes have told.
            files: where the steps before have told something.
        """
        if any(isinstance(event, StepFailed) for event in events):
            return
        unfinished = [item.stage for item in executions(events) if item.state == "unfinished"]
        if self._stopped and not unfinished:
            return
        failed = died([name, *unfinished][-1], status)
        if not all(file.exists() for file in files):
            message = f"{self._workspace.folder} was deleted while the step ran"
            failed = replace(failed, message=message)
        if self._stopped:
            failed = replace(failed, error="Stopped", message="killed, on request")
        with contextlib.closing(self._workspace.stream("pipeline")) as stream:
            stream.emit(failed)


def died(stage: str, status: int) -> StepFailed:
    """Return the failure of a process that ended without reporting one."""
    return StepFailed(stage=stage, error="Died", message=_how(status), remedy=_REMEDY)


_CAUSES = {
    "SIGKILL": ", which the kernel sends when memory runs out",
    "SIGABRT": ", with which a library gives up, for example without memory; the log ends with why",
}


def _show(output: IO[str]) -> None:
    for text in output:
        # A full disk ends the log, not the step.
        with contextlib.suppress(OSError):
            print(redact(text), end="", flush=True)


def _how(status: int) -> str:
    number = -status if status < 0 else status - 128
    try:
        killed = signal.Signals(number).name
    except ValueError:
        return f"ended with exit status {status} and no error message; its output is in the log"
    return f"killed by {killed}{_CAUSES.get(killed, '')}{memory_limit()}"
