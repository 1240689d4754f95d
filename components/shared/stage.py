"""The frame around every step: events, clear failure, and what it leaves behind."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass

from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.config.secrets import redact
from steadytrain.components.shared.environment import environment
from steadytrain.components.shared.errors import RunBusy, SteadytrainError, Stopped
from steadytrain.components.shared.events import Event, EventStream
from steadytrain.components.shared.events.types import (
    StepFailed,
    StepFinished,
    StepStarted,
    WorkProgress,
)
from steadytrain.components.shared.redaction import redact_tracebacks
from steadytrain.components.shared.stopping import Stopping, stoppable
from steadytrain.components.shared.workspace import Workspace


@dataclass
class Stage:
    """A step at work. Set `summary` and `reused` before it ends."""

    name: str
    workspace: Workspace
    stream: EventStream
    stopping: Stopping
    summary: str = ""
    reused: bool = False

    def emit(self, event: Event) -> None:
        self.stream.emit(event)

    def check(self) -> None:
        """To be called right before what cannot be undone.

        Raises:
            Stopped: this process was asked to stop.
        """
        self.stopping.check()

    def progress(self, work: str, done: float, total: float | None, unit: str) -> None:
        """Reports how far a long piece of work is; raises Stopped as `check` does."""
        self.check()
        self.emit(WorkProgress(stage=self.name, work=work, done=done, total=total, unit=unit))


_QUIET = {
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
}
"""Libraries' own progress bars, which fill a step's log with half lines."""


@contextlib.contextmanager
def stage(
    config: RunConfig, name: str, *, holding: AbstractContextManager[object] | None = None
) -> Iterator[Stage]:
    """Runs a step: its start, its end or its failure are events of the run.

    Args:
        holding: what the step must hold before it may tell anything of the run, for as long as
            it works. Where that is another's, or becomes so, the run is not ours to tell of.

    Raises:
        Stopped: this process was asked to stop.
    """
    for variable, value in _QUIET.items():
        os.environ.setdefault(variable, value)
    redact_tracebacks()
    workspace = Workspace.of(config)
    workspace.create()
    with contextlib.ExitStack() as held:
        current = None
        try:
            with stoppable() as stopping:
                if holding is not None:
                    held.enter_context(holding)
                current = _begun(name, workspace, stopping)
                yield current
                stopping.check()
        except BaseException as error:
            anothers = holding is not None and isinstance(error, RunBusy)
            if current is None and not anothers and not isinstance(error, Stopped):
                current = _begun(name, workspace, Stopping())
            if current is not None and not anothers:
                current.emit(_failure(name, error))
            raise
        else:
            current.emit(StepFinished(stage=name, reused=current.reused, summary=current.summary))
        finally:
            if current is not None:
                current.stream.close()


def _begun(name: str, workspace: Workspace, stopping: Stopping) -> Stage:
    current = Stage(name, workspace, workspace.stream(name), stopping)
    current.emit(StepStarted(stage=name, environment=dict(environment())))
    return current


def _failure(name: str, error: BaseException) -> StepFailed:
    message, remedy = str(error), ""
    if isinstance(error, SteadytrainError):
        message, remedy = error.message, error.remedy
    elif isinstance(error, Stopped | KeyboardInterrupt):
        message, remedy = "stopped", "start the run again: it continues from what is done"
    return StepFailed(
        stage=name, error=type(error).__name__, message=redact(message), remedy=remedy
    )
