"""The runs in an output folder, and the lock that lets one command at a time use a run."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from pydantic import ValidationError

from steadytrain.components.report.facts import gather
from steadytrain.components.report.story import outcome
from steadytrain.components.shared.config import RunConfig, load
from steadytrain.components.shared.config.run import RUN_NAME
from steadytrain.components.shared.errors import BadInput, RunBusy, StorageError, Unreadable
from steadytrain.components.shared.events import Event
from steadytrain.components.shared.events.types import StepFailed, StepFinished, StepStarted
from steadytrain.components.shared.lease import is_held, try_lock
from steadytrain.components.shared.processes import Identity
from steadytrain.components.shared.quantities import timestamp
from steadytrain.components.shared.storage import LocalStorage
from steadytrain.components.shared.storage.local import local_errors
from steadytrain.components.shared.workspace import Workspace

_NAME_SECONDS = 1.0
"""How long to wait for a holder's name, which it writes right after it locks the file."""
_LOOK_SECONDS = 0.01
_UNKNOWN = Identity(pid=0, host="an unknown host", machine="", born=0.0, since="an unknown time")


@contextlib.contextmanager
def run_lock(workspace: Workspace, *, linger_seconds: float = 0.0) -> Iterator[int]:
    """Hold a run for this process.

    Args:
        linger_seconds: how long to wait for a holder in another container or on another host to
            end.

    Yields:
        The locked descriptor, for child processes that must hold the lock as well.

    Raises:
        RunBusy: another process holds the lock. The message says which, where, and since when.
        StorageError: the lock file cannot be written.
    """
    path = _path(workspace)
    with local_errors("write", path):
        path.parent.mkdir(parents=True, exist_ok=True)
        # Unbuffered: after a failed write, a buffer would write again when the file is closed.
        handle = path.open("ab+", buffering=0)
    with handle:
        deadline = time.monotonic() + linger_seconds
        while not try_lock(handle):
            # Without a holder, another process was only checking who holds the lock.
            owner = holder(workspace)
            if owner is not None and (not _elsewhere(owner) or time.monotonic() > deadline):
                raise _busy(workspace, owner)
            time.sleep(_LOOK_SECONDS)
        with local_errors("write", path):
            handle.truncate(0)
            handle.write(Identity.here().model_dump_json().encode())
        try:
            yield handle.fileno()
        finally:
            handle.truncate(0)


def holder(workspace: Workspace) -> Identity | None:
    """Return who holds a run, or None if nobody does. Only reads.

    Raises:
        StorageError: the lock file cannot be read.
    """
    path = _path(workspace)
    try:
        with local_errors("read", path):
            handle = path.open(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return None
    deadline = time.monotonic() + _NAME_SECONDS
    with handle:
        # A shared lock, so that two processes that only check do not block each other.
        while not try_lock(handle, shared=True):
            result = _read(handle)
            if result is not None:
                return result
            if time.monotonic() > deadline:
                return _UNKNOWN
            time.sleep(_LOOK_SECONDS)
    return None


def _path(workspace: Workspace) -> Path:
    return workspace.locks / f"{workspace.run_id}.run"


def _elsewhere(found: Identity) -> bool:
    return found is not _UNKNOWN and found.alive() is None


def _read(handle: IO[str]) -> Identity | None:
    handle.seek(0)
    try:
        return Identity.model_validate_json(handle.read())
    except ValidationError:
        return None


def _busy(workspace: Workspace, found: Identity | None) -> RunBusy:
    return RunBusy(
        f"run {workspace.run_id!r} in {workspace.output} is in use by {found or _UNKNOWN}",
        remedy=f"wait for it, stop it (steadytrain stop {workspace.run_id} "
        f"--output {workspace.output}), or give this run another name (run: ...)",
    )


STEPS = (
    *("begin", "preprocess", "tune", "search", "winner", "cross-validate"),
    *("train", "evaluate", "register", "promote", "report"),
)


@dataclass(frozen=True)
class RunState:
    """One run in a list: its state, and the step that it last reached.

    damage: problems with files that cannot be read.
    summary: the state in a sentence.
    """

    run_id: str
    state: str
    step: str
    started: float
    damage: Sequence[str] = ()
    summary: str = ""

    def as_data(self) -> dict[str, Any]:
        """Return the state for programs."""
        started = timestamp(self.started)
        named = {"run": self.run_id, "state": self.state, "step": self.step, "started": started}
        return {**named, "damaged": list(self.damage), "summary": self.summary}


def list_runs(output: Path) -> Iterator[RunState]:
    """Yield the state of every run in an output folder, sorted by name."""
    for folder in run_folders(output):
        yield state_of(Workspace(output, folder.name))


def run_folders(output: Path) -> list[Path]:
    """Return the folders in `runs` that can belong to a run, sorted by name."""
    folders = sorted((output / "runs").glob("*"))
    return [path for path in folders if re.fullmatch(RUN_NAME, path.name) and path.is_dir()]


def find_workspace(output: Path, run_id: str) -> Workspace:
    """Return the workspace of a run, whatever state its files are in.

    Raises:
        BadInput: the folder has no such run; the message lists the runs it has.
    """
    workspace = Workspace(output.absolute(), run_id)
    # An invalid name could lead to another folder.
    if not re.fullmatch(RUN_NAME, run_id) or not workspace.folder.is_dir():
        known = ", ".join(path.name for path in run_folders(output)) or "none"
        raise BadInput(
            f"run {run_id!r}: not in {output}",
            remedy=f"its runs: {known}; --output selects another folder",
        )
    return workspace


def find_run(output: Path, run_id: str) -> tuple[RunConfig, Workspace]:
    """Return the configuration and the workspace of a run.

    Raises:
        BadInput: the folder has no such run, or the run's configuration is missing or damaged.
    """
    workspace = find_workspace(output, run_id)
    try:
        config = load(LocalStorage(workspace.folder).read(workspace.config.name).decode() + "\n")
    except (FileNotFoundError, Unreadable, BadInput, ValueError) as error:
        why = "is missing" if isinstance(error, FileNotFoundError) else f"cannot be used: {error}"
        raise BadInput(
            f"{workspace.config} {why}",
            remedy="start the run again with its configuration (steadytrain run SOURCE --run "
            f"{run_id} --output {output}), which writes the file again, or restore it",
        ) from error
    # The folder may have been moved since the file was written.
    moved = {"output": str(workspace.output), "run": run_id}
    return config.model_copy(update=moved), workspace


def state_of(workspace: Workspace, *, ours: bool = False) -> RunState:
    """Return a run's state since its last start; "damaged" means that files cannot be read.

    Args:
        workspace: of the run.
        ours: whether this process holds the run's lock, so that no other one is using the run.
    """
    problem = ""
    try:
        running = not ours and _is_held(workspace)
    except StorageError as error:
        running, problem = False, error.message
    facts = gather(workspace, running=running)
    steps = [
        event
        for event in facts.events
        if isinstance(event, StepStarted | StepFinished | StepFailed)
    ]
    begins = [index for index, event in enumerate(steps) if _begins_run(event)]
    last_time = steps[begins[-1] :] if begins else steps
    damage = [*facts.unreadable, *filter(None, [problem])]
    run_summary = outcome(facts)
    state = "damaged" if damage and not running else run_summary.state
    if not last_time:
        return RunState(workspace.run_id, "damaged" if damage else "empty", "", 0.0, damage)
    failed = next((event for event in last_time if isinstance(event, StepFailed)), None)
    last = failed or last_time[-1]
    return RunState(
        workspace.run_id, state, last.stage, last_time[0].time, damage, run_summary.sentence
    )


def is_running(workspace: Workspace) -> bool:
    """Return whether a process works on a run. A run whose lease cannot be read is not running."""
    try:
        return _is_held(workspace)
    except StorageError:
        return False


def _is_held(workspace: Workspace) -> bool:
    return holder(workspace) is not None or is_held(LocalStorage(workspace.lease))


def _begins_run(event: Event) -> bool:
    return isinstance(event, StepStarted) and event.stage == STEPS[0]
