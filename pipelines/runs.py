"""The runs of an output folder, as their events tell."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from steadytrain.components.report.facts import gather
from steadytrain.components.report.story import outcome
from steadytrain.components.shared.config import RunConfig, load
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.shared.events import Event, read_events
from steadytrain.components.shared.events.types import StepFailed, StepFinished, StepStarted
from steadytrain.components.shared.lock import holder
from steadytrain.components.shared.storage import LocalStorage
from steadytrain.components.shared.workspace import Workspace
from steadytrain.components.train.lease import held

STEPS = ("begin", "preprocess", "train", "evaluate", "register", "promote", "report")


@dataclass(frozen=True)
class RunState:
    """One run in a list: its last step and how that stands."""

    run_id: str
    state: str
    step: str
    started: float


def list_runs(output: Path) -> Iterator[RunState]:
    """Every run of an output folder, by name."""
    for folder in sorted((output / "runs").glob("*")):
        if folder.is_dir():
            yield state_of(Workspace(output, folder.name))


def find_run(output: Path, run_id: str) -> tuple[RunConfig, Workspace]:
    """The configuration and the workspace of a run.

    Raises:
        BadInput: the folder holds no such run; the message names those that it holds.
    """
    workspace = Workspace(output.absolute(), run_id)
    if not workspace.config.is_file():
        known = ", ".join(run.run_id for run in list_runs(output)) or "none"
        raise BadInput(
            f"run {run_id!r}: not in {output}",
            remedy=f"the runs there: {known}; --output names another folder",
        )
    config = load(workspace.config)
    # The folder may have been moved since it was written.
    moved = {"output": str(workspace.output), "run": run_id}
    return config.model_copy(update=moved), workspace


def state_of(workspace: Workspace) -> RunState:
    """How a run stands, by its last start."""
    steps = [
        event
        for event in read_events(workspace.events)
        if isinstance(event, StepStarted | StepFinished | StepFailed)
    ]
    begins = [index for index, event in enumerate(steps) if _begins_run(event)]
    last_time = steps[begins[-1] :] if begins else steps
    if not last_time:
        return RunState(workspace.run_id, "empty", "", 0.0)
    failed = next((event for event in last_time if isinstance(event, StepFailed)), None)
    last = failed or last_time[-1]
    running = holder(workspace) is not None or held(LocalStorage(workspace.lease))
    state = "running" if running else outcome(gather(workspace)).state
    return RunState(workspace.run_id, state, last.stage, last_time[0].time)


def _begins_run(event: Event) -> bool:
    return isinstance(event, StepStarted) and event.stage == STEPS[0]
