"""The frame around every step: events, clear failure, and what it leaves behind."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NoReturn

from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.config.secrets import redact
from steadytrain.components.shared.environment import environment
from steadytrain.components.shared.errors import SteadytrainError, Stopped
from steadytrain.components.shared.events import Event, EventStream
from steadytrain.components.shared.events.types import (
    StepFailed,
    StepFinished,
    StepStarted,
    WorkProgress,
)
from steadytrain.components.shared.workspace import Workspace


@dataclass
class Stage:
    """A step at work. Set `summary` and `reused` before it ends."""

    name: str
    workspace: Workspace
    stream: EventStream
    summary: str = ""
    reused: bool = False

    def emit(self, event: Event) -> None:
        self.stream.emit(event)

    def progress(self, work: str, done: float, total: float | None, unit: str) -> None:
        """Reports how far a long piece of work is."""
        self.emit(WorkProgress(stage=self.name, work=work, done=done, total=total, unit=unit))


_QUIET = {
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
}
"""Libraries' own progress bars, which fill a step's log with half lines."""


@contextlib.contextmanager
def stage(config: RunConfig, name: str) -> Iterator[Stage]:
    """Runs a step: its start, its end or its failure are events of the run."""
    for variable, value in _QUIET.items():
        os.environ.setdefault(variable, value)
    workspace = Workspace.of(config)
    workspace.create()
    stream = workspace.stream(name)
    current = Stage(name, workspace, stream)
    current.emit(StepStarted(stage=name, environment=dict(environment())))
    try:
        with _stoppable():
            yield current
    except BaseException as error:
        current.emit(_failure(name, error))
        raise
    else:
        current.emit(StepFinished(stage=name, reused=current.reused, summary=current.summary))
    finally:
        stream.close()


@contextlib.contextmanager
def _stoppable() -> Iterator[None]:
    """SIGTERM leaves by an exception, so that what is half done is taken away."""

    def leave(*_: object) -> NoReturn:
        raise Stopped

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _failure(name: str, error: BaseException) -> StepFailed:
    message, remedy = str(error), ""
    if isinstance(error, SteadytrainError):
        message, remedy = error.message, error.remedy
    elif isinstance(error, Stopped | KeyboardInterrupt):
        message, remedy = "stopped", "start the run again: it continues from what is done"
    return StepFailed(
        stage=name, error=type(error).__name__, message=redact(message), remedy=remedy
    )
