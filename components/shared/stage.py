"""The wrapper around every step: events, clear errors, and the outcome."""

from __future__ import annotations

import contextlib
import functools
import os
import platform
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from importlib import metadata

from steadytrain.components.shared.cluster import this_pod_name
from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.config.secrets import redact
from steadytrain.components.shared.digest import code_digest
from steadytrain.components.shared.errors import RunBusy, SteadytrainError, Stopped
from steadytrain.components.shared.events import Event, EventStream
from steadytrain.components.shared.events.types import (
    StepFailed,
    StepFinished,
    StepStarted,
    Warned,
    WorkProgress,
)
from steadytrain.components.shared.logs import following
from steadytrain.components.shared.quantities import duration
from steadytrain.components.shared.redaction import redact_tracebacks
from steadytrain.components.shared.retry import waiting
from steadytrain.components.shared.stopping import Stopping, stoppable
from steadytrain.components.shared.workspace import Workspace

_PACKAGES = ("steadytrain", "torch", "transformers", "accelerate", "datasets", "mlflow", "kfp")


@dataclass
class Stage:
    """A running step. Set `summary` before it ends, and call `reuse` if it reuses a result."""

    name: str
    workspace: Workspace
    stream: EventStream
    stopping: Stopping
    summary: str = ""
    reused: bool = False
    reused_from: str = ""
    began: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        """How long it has worked, however the clock was set meanwhile."""
        return time.monotonic() - self.began

    def reuse(self, origin: Workspace) -> None:
        """Say that this step uses an earlier result, which may be another run's."""
        self.reused = True
        if origin != self.workspace:
            self.reused_from = origin.run_id

    def begin(self) -> None:
        self.emit(
            StepStarted(stage=self.name, environment=dict(environment()), pod=this_pod_name())
        )

    def emit(self, event: Event) -> None:
        self.stream.emit(event)

    def check(self) -> None:
        """Check right before anything that cannot be undone.

        Raises:
            Stopped: if this process was asked to stop.
        """
        self.stopping.check()

    def progress(self, work: str, done: float, total: float | None, unit: str) -> None:
        """Report the progress of a long operation. Raises Stopped, as `check` does."""
        self.check()
        self.emit(WorkProgress(stage=self.name, work=work, done=done, total=total, unit=unit))


_QUIET = {
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "TQDM_DISABLE": "1",
}
"""Libraries' own progress bars, which fill a step's log with partial lines."""


def quiet() -> None:
    """Turn off progress bars. Call this before the libraries are imported: some check only then."""
    for variable, value in _QUIET.items():
        os.environ.setdefault(variable, value)


@contextlib.contextmanager
def stage(
    config: RunConfig, name: str, *, holding: AbstractContextManager[object] | None = None
) -> Iterator[Stage]:
    """Run a step. Its start, end and failure are events of the run.

    Args:
        config: the run's configuration.
        name: the step's name.
        holding: what the step must hold before it reports events of the run, and while it works. If
            another process holds it or takes it over, this step reports nothing more.

    Raises:
        Stopped: if this process was asked to stop.
    """
    # Imported here, since processes that only import a step need none of what talks to MLflow.
    from steadytrain.components.shared.tracking.notes import settle

    quiet()
    redact_tracebacks()
    workspace = Workspace.of(config)
    workspace.create()
    with following(config, workspace), contextlib.ExitStack() as held:
        current = None
        try:
            with stoppable() as stopping:
                if holding is not None:
                    held.enter_context(holding)
                settle(workspace)
                # Assigned first: a request to stop may come while the start is written.
                current = Stage(name, workspace, workspace.stream(name), stopping)
                current.begin()
                seconds = config.recovery.server_wait_seconds
                held.enter_context(waiting(seconds, partial(report_wait, current, seconds)))
                yield current
                stopping.check()
        except BaseException as error:
            anothers = holding is not None and isinstance(error, RunBusy)
            if current is None and not anothers and not isinstance(error, Stopped):
                current = Stage(name, workspace, workspace.stream(name), Stopping())
                current.begin()
            if current is not None and not anothers:
                current.emit(_failure(current, error))
            raise
        else:
            current.emit(
                StepFinished(
                    stage=name,
                    seconds=current.seconds,
                    reused=current.reused,
                    summary=current.summary,
                    reused_from=current.reused_from,
                )
            )
        finally:
            if current is not None:
                current.stream.close()


def report_wait(current: Stage, seconds: float, why: str) -> None:
    """Warn that a step waits for the tracking server."""
    message = f"waiting up to {duration(seconds)} for the tracking server: {why}"
    current.emit(Warned(stage=current.name, message=redact(message)))


def _failure(current: Stage, error: BaseException) -> StepFailed:
    message, remedy, passing = str(error), "", False
    if isinstance(error, SteadytrainError):
        message, remedy, passing = error.message, error.remedy, error.passing
    elif isinstance(error, Stopped | KeyboardInterrupt):
        message, remedy = "stopped", "start the run again: it continues where it stopped"
    return StepFailed(
        stage=current.name,
        seconds=current.seconds,
        error=type(error).__name__,
        message=redact(message),
        remedy=remedy,
        passing=passing,
    )


@functools.cache
def environment() -> dict[str, str]:
    """Return versions by name: Python, the platform, installed packages, and steadytrain's code."""
    found = {"python": platform.python_version(), "platform": platform.platform()}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found | {"code": code_digest()}
