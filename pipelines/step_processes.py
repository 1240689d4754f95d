"""The processes of the steps of a local run: start, stop, and clean up."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import IO

from steadytrain.components.report.story import executions
from steadytrain.components.shared.errors import StorageError, Unkillable
from steadytrain.components.shared.events import Cursor, Event
from steadytrain.components.shared.events.types import StepFailed
from steadytrain.components.shared.lease import is_held
from steadytrain.components.shared.output_log import open_log
from steadytrain.components.shared.redaction import redact
from steadytrain.components.shared.stopping import Lifeline
from steadytrain.components.shared.storage import LocalStorage
from steadytrain.components.shared.workspace import Workspace
from steadytrain.components.train.agent.fork_server import LIFELINE, OUTPUT, ForkServer, Served
from steadytrain.components.train.agent.processes import KILL_SECONDS, MARK, end_processes
from steadytrain.pipelines.step_template import CLOSING, PROGRAM
from steadytrain.pipelines.unexpected import memory_limit

_OUTPUT_SECONDS = 5.0
_POLL_SECONDS = 0.2
_REMEDY = "the same command continues the run where it stopped"


class StepProcesses:
    """Runs one step at a time.

    A lifeline ties each step to this process. If the lifeline is cut or this process dies, the
    running step stops, and so does any step that starts too late to be seen here. The closing step
    has its own lifeline, which only the death of this process cuts.

    Args:
        workspace: the run's; a step that was killed is recorded in its events.
        config: file with the run's configuration.
        also_hold: descriptors that every step inherits.
        imports: modules by step. While it runs, they are imported for the steps after it.
        on_poll: called again and again while a step runs.
    """

    def __init__(
        self,
        workspace: Workspace,
        config: Path,
        also_hold: Sequence[int] = (),
        *,
        imports: Mapping[str, Sequence[str]] = MappingProxyType({}),
        on_poll: Callable[[], object] = lambda: None,
    ) -> None:
        self._workspace, self._config, self._also_hold = workspace, config, tuple(also_hold)
        self._on_poll = on_poll
        self._log_to = open_log(workspace.logs / "pipeline.log")
        self._steps, self._closing = Lifeline(), Lifeline()
        self._template = self._new_template()
        self._imports = imports
        self._step: int | None = None
        self._stopped = False
        self._killed: float | None = None
        self._unkillable: list[int] = []

    def run(self, name: str) -> int | None:
        """Run a step to its end, and write its output to the log.

        Returns:
            Its exit status, or None if it was not started because of a stop.
        """
        closing = name == CLOSING
        if self._stopped and not closing:
            return None
        # By position, because the clock may be set while the step runs.
        news = Cursor(self._workspace.events)
        news.skip_to_end()
        if not self._template.alive:
            self._template = self._new_template()
        served, output = self._fork(name, self._closing if closing else self._steps)
        pid = served.wait_for_start()
        if not closing:
            self._step = pid
            if self._killed is not None:
                self.end_now()
        copying = threading.Thread(target=self._log, args=(output,), daemon=True)
        copying.start()
        status = self._wait(served)
        self._step = None
        # Processes that a step leaves behind would keep its output open.
        status = self._end_leftovers(name) or status
        copying.join(None if not self._unkillable else _OUTPUT_SECONDS)
        if status and not self._taken_over():
            before = [news.folder / file for file in news.position]
            self._record(name, status, news.new(), before)
        return status

    def _fork(self, name: str, line: Lifeline) -> tuple[Served, IO[str]]:
        """Start a step in its own session.

        Returns:
            The step and its output, which ends once the last process that holds it has ended.
        """
        reading, writing = os.pipe()
        try:
            served = self._template.request(
                [name, str(self._config)],
                {**os.environ, MARK: str(self._workspace.folder)},
                descriptors={OUTPUT: writing, LIFELINE: line.descriptor},
                imports=self._imports.get(name, ()),
            )
        finally:
            os.close(writing)
        return served, os.fdopen(reading, encoding="utf-8", errors="replace")

    def _wait(self, served: Served) -> int:
        """Return a step's exit status, or 1 if it was killed and does not end."""
        while (status := served.wait(_POLL_SECONDS)) is None:
            self._on_poll()
            killed = self._killed if self._step is not None else None
            if killed is not None and time.monotonic() - killed > KILL_SECONDS:
                # `_end_leftovers` reports what it is.
                return 1
        return status

    def stop(self) -> None:
        """Stop the running step, and start no other step except the closing one."""
        self._stopped = True
        self._steps.cut()

    def end_now(self) -> None:
        """Kill the running step. The closing step still gets its time."""
        self._killed = time.monotonic()
        self.stop()
        if self._step is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._step, signal.SIGKILL)

    def close(self) -> None:
        """End all processes, so that none is left behind.

        Raises:
            Unkillable: a process does not end.
        """
        self._template.kill()
        try:
            end_processes(self._workspace.folder, spared=self._unkillable)
        finally:
            self._steps.close()
            self._closing.close()
            os.close(self._log_to)

    def _new_template(self) -> ForkServer:
        return ForkServer.start(
            PROGRAM,
            # The mark makes the program and the steps processes of the run.
            environment={**os.environ, MARK: str(self._workspace.folder)},
            output=self._log_to,
            also_hold=self._also_hold,
        )

    def _log(self, output: IO[str]) -> None:
        with output:
            for text in output:
                # A full disk ends the log, not the step.
                with contextlib.suppress(OSError):
                    os.write(self._log_to, redact(text).encode())

    def _taken_over(self) -> bool:
        """Return whether another supervisor trains the run, and so will report on it."""
        with contextlib.suppress(StorageError):
            return is_held(LocalStorage(self._workspace.lease))
        return False

    def _end_leftovers(self, name: str) -> int:
        """End what a step left behind. Return 1, and report it, if that cannot be killed."""
        spared = [self._template.pid, *self._unkillable]
        try:
            end_processes(self._workspace.folder, spared=spared)
        except Unkillable as error:
            self._unkillable += error.pids
            failed = StepFailed(
                stage=name, error="Unkillable", message=error.message, remedy=error.remedy
            )
            self._workspace.add_events("pipeline", failed)
            return 1
        return 0

    def _record(
        self, name: str, status: int, events: Sequence[Event], files: Sequence[Path]
    ) -> None:
        """Record how a step ended if it could not do so itself.

        Args:
            events: what the step and its processes reported.
            files: where the steps before reported.
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
        self._workspace.add_events("pipeline", failed)


def died(stage: str, status: int) -> StepFailed:
    """Return the failure of a process that ended without reporting one."""
    return StepFailed(stage=stage, error="Died", message=_how(status), remedy=_REMEDY)


_CAUSES = {
    "SIGKILL": ", which the kernel sends when memory runs out",
    "SIGABRT": ", with which a library gives up, for example without memory; the log ends with why",
}


def _how(status: int) -> str:
    number = -status if status < 0 else status - 128
    try:
        killed = signal.Signals(number).name
    except ValueError:
        return f"ended with exit status {status} and no error message; its output is in the log"
    return f"killed by {killed}{_CAUSES.get(killed, '')}{memory_limit()}"
