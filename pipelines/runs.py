"""The runs in an output folder, according to their events."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from steadytrain.components.report.facts import gather
from steadytrain.components.report.story import outcome
from steadytrain.components.shared.config import RunConfig, load
from steadytrain.components.shared.config.run import RUN_NAME
from steadytrain.components.shared.errors import BadInput, StorageError, Unreadable
from steadytrain.components.shared.events import Event
from steadytrain.components.shared.events.types import StepFailed, StepFinished, StepStarted
from steadytrain.components.shared.lease import held
from steadytrain.components.shared.storage import LocalStorage
from steadytrain.components.shared.workspace import Workspace
from steadytrain.pipelines.json_output import moment
from steadytrain.pipelines.lock import holder

STEPS = (
    *("begin", "preprocess", "tune", "winner", "cross-validate"),
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
        started = moment(self.started)
        named = {"run": self.run_id, "state": self.state, "step": self.step, "started": started}
        return {**named, "damaged": list(self.damage), "summary": self.summary}


def list_runs(output: Path) -> Iterator[RunState]:
    """Yield the state of every run in an output folder, sorted by name."""
    for folder in run_folders(output):
        yield state_of(Workspace(output, folder.name))


def run_folders(output: Path) -> list[Path]:
    """Return the folders in `runs` that can belong to a run, sorted by name."""
    found = sorted((output / "runs").glob("*"))
    return [path for path in found if re.fullmatch(RUN_NAME, path.name) and path.is_dir()]


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
    standing = outcome(facts)
    state = "damaged" if damage and not running else standing.state
    if not last_time:
        return RunState(workspace.run_id, "damaged" if damage else "empty", "", 0.0, damage)
    failed = next((event for event in last_time if isinstance(event, StepFailed)), None)
    last = failed or last_time[-1]
    return RunState(
        workspace.run_id, state, last.stage, last_time[0].time, damage, standing.sentence
    )


def is_running(workspace: Workspace) -> bool:
    """Return whether a process works on a run. A run whose lease cannot be read is not running."""
    try:
        return _is_held(workspace)
    except StorageError:
        return False


def _is_held(workspace: Workspace) -> bool:
    return holder(workspace) is not None or held(LocalStorage(workspace.lease))


def _begins_run(event: Event) -> bool:
    return isinstance(event, StepStarted) and event.stage == STEPS[0]
