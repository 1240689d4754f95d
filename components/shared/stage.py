"""The wrapper around every step: events, clear errors, and the outcome."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Generic, TypeVar

from pydantic import ValidationError

from steadytrain.components.shared.cluster import this_pod_name
from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.config.secrets import redact
from steadytrain.components.shared.digest import code_digest, file_digest, value_digest
from steadytrain.components.shared.environment import versions
from steadytrain.components.shared.errors import BadInput, RunBusy, SteadytrainError, Stopped
from steadytrain.components.shared.events import Event, EventStream
from steadytrain.components.shared.events.types import (
    StepFailed,
    StepFinished,
    StepStarted,
    Warned,
    WorkProgress,
)
from steadytrain.components.shared.lease import Lease
from steadytrain.components.shared.lm_tasks import check_lm_tasks
from steadytrain.components.shared.log import following
from steadytrain.components.shared.quantities import duration, size
from steadytrain.components.shared.records import Record
from steadytrain.components.shared.redaction import redact_tracebacks
from steadytrain.components.shared.retry import retry, waiting
from steadytrain.components.shared.stopping import Stopping, stoppable
from steadytrain.components.shared.storage import LocalStorage
from steadytrain.components.shared.tracking import check_tracking, parent_run
from steadytrain.components.shared.workspace import Workspace

_PACKAGES = ("steadytrain", "torch", "transformers", "accelerate", "datasets", "mlflow", "kfp")


@dataclass
class Stage:
    """A running step. Set `summary` before it ends, and call `reuse` if it reuses a result.

    lease: of the run, if the step holds it.
    """

    name: str
    workspace: Workspace
    stream: EventStream
    stopping: Stopping
    summary: str = ""
    reused: bool = False
    reused_from: str = ""
    lease: Lease | None = None
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
    config: RunConfig, name: str, *, holding: AbstractContextManager[Lease] | None = None
) -> Iterator[Stage]:
    """Run a step. Its start, end and failure are events of the run.

    Args:
        config: the run's configuration.
        name: the step's name.
        holding: the run's lease, if the step must hold that before it reports events of the run,
            and while it works. If another process holds it or takes it over, this step reports
            nothing more.

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
                lease = held.enter_context(holding) if holding is not None else None
                settle(workspace)
                # Assigned first: a request to stop may come while the start is written.
                current = Stage(name, workspace, workspace.stream(name), stopping, lease=lease)
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
    return versions("platform", _PACKAGES) | {"code": code_digest()}


R = TypeVar("R", bound=Record)


class _File(Record):
    """A file of a result.

    path: relative to the output folder, which may be moved or copied; absolute if it is elsewhere.
    """

    path: str
    bytes: int
    digest: str


class _Entry(Record):
    run_id: str
    created: float
    result: dict[str, Any]
    files: list[_File]


def step_key(*parts: Any, code: tuple[str, ...]) -> str:
    """Return the key of a step's outputs: digest over `parts` (plain data) and the step's code.

    Args:
        parts: everything else that determines the outputs.
        code: the folders of `components` whose code determines the outputs.
    """
    return value_digest([*parts, code_digest(*code)])


class ReuseStore(Generic[R]):
    """Stores the result records of one step."""

    def __init__(self, workspace: Workspace, step: str, result: type[R]) -> None:
        self.workspace, self.result = workspace, result
        self.folder = workspace.output / "reuse" / step

    def find(self, key: str, *, ttl_seconds: float) -> R | None:
        """Return the result for a key, or None if there is no readable and valid one."""
        try:
            entry = self._entry(key)
            result = self.result.model_validate(entry.result)
        except (OSError, ValidationError):
            return None
        young = time.time() - entry.created <= ttl_seconds
        if not (young or entry.run_id == self.workspace.run_id):
            return None
        if not all(_intact(self.workspace.output / file.path, file) for file in entry.files):
            return None
        return result.in_output(self.workspace.output)

    def origin(self, key: str) -> Workspace:
        """Return the workspace of the run that computed the result that `find` returned."""
        return Workspace(self.workspace.output, self._entry(key).run_id)

    def remember(self, key: str, result: R, files: Iterable[Path]) -> None:
        """Store a result together with its files."""
        entry = _Entry(
            run_id=self.workspace.run_id,
            created=time.time(),
            result=result.model_dump(mode="json"),
            files=[
                _File(path=self._name(path), bytes=path.stat().st_size, digest=file_digest(path))
                for path in files
            ],
        )
        entry.save(self._file(key))

    def _name(self, path: Path) -> str:
        output = self.workspace.output
        return str(path.relative_to(output) if path.is_relative_to(output) else path)

    def _entry(self, key: str) -> _Entry:
        return _Entry.model_validate_json(self._file(key).read_bytes())

    def _file(self, key: str) -> Path:
        return self.folder / f"{key}.json"


def _intact(path: Path, file: _File) -> bool:
    try:
        return path.stat().st_size == file.bytes and file_digest(path) == file.digest
    except OSError:
        # Missing, owned by another user, or on a broken disk: the step runs again.
        return False


MIN_FREE_BYTES = 200 * 2**20
"""With less space, not even the checkpoints of a small run fit."""


def start_run(config: RunConfig, tags: Mapping[str, str] = MappingProxyType({})) -> Workspace:
    """Create the run's folder, store its configuration, and open its MLflow run.

    Safe to repeat: an existing run is continued.

    Args:
        config: the run's configuration.
        tags: additional tags for the MLflow run.

    Raises:
        BadInput: if the output cannot be written or has too little space, or an evaluation task
            cannot run.
        TrackingError: if the tracking server cannot be used. If it is only down, this waits for it
            first (`recovery.server_wait_seconds`).
    """
    with stage(config, "begin") as current:
        workspace = current.workspace
        check_room(workspace)
        check_lm_tasks(config)
        seconds = config.recovery.server_wait_seconds
        retry(
            lambda: check_tracking(config, workspace),
            seconds=seconds,
            report=partial(report_wait, current, seconds),
        )
        LocalStorage(workspace.folder).write(workspace.config.name, config.to_saved())
        parent_run(config, workspace, tags)
        current.summary = f"run {config.run_id} in {workspace.output}"
        return workspace


def check_room(workspace: Workspace) -> None:
    """Raise BadInput if the disk of an output folder has too little space for a run."""
    free = shutil.disk_usage(workspace.nearest()).free
    if free < MIN_FREE_BYTES:
        raise BadInput(
            f"output = {str(workspace.output)!r} has {size(free)} free, "
            f"less than {size(MIN_FREE_BYTES)}",
            remedy="free space there, or set another output",
        )
