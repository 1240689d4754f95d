"""`steadytrain profile`: profile a few training steps, and say what to change first."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Annotated, Final

import typer

from steadytrain.components.shared.digest import value_digest
from steadytrain.pipelines import json_output
from steadytrain.pipelines.json_output import Json
from steadytrain.pipelines.options import DataSource, Overrides, Run, RunOutput, check_extra, given

if TYPE_CHECKING:
    from steadytrain.components.shared.workspace import Workspace

_WARM_UP: Final = 10
_RECORDED: Final = 5
_LONGEST: Final = 44
"""Longest name of a run for which the name of its profile is valid."""


def profile_name(run: str) -> str:
    """Return the name of the run that profiles another. Long names are shortened, not merged."""
    if len(run) > _LONGEST:
        digest = value_digest(run)[:8]
        run = f"{run[: _LONGEST - len(digest) - 1]}-{digest}"
    return f"{run}-profile"


def profile(
    source: DataSource = "causal-lm",
    overrides: Overrides = [],  # noqa: B006  typer copies it
    name: Run = None,
    output: RunOutput = None,
    warm_up: Annotated[
        int, typer.Option(min=1, help="Steps before those that are recorded.")
    ] = _WARM_UP,
    steps: Annotated[
        int, typer.Option(min=1, max=100, help="Steps that are recorded.")
    ] = _RECORDED,
    as_json: Json = False,
) -> None:
    """Profile a few training steps on this machine, and say what to change first.

    Prepares the data and trains for 15 steps as a run of its own, RUN-profile, on every rank. No
    model is evaluated or registered. Shows in ten lines where the time goes, and the three changes
    with the largest expected gain. The folder profile of that run has a Chrome trace for each
    rank and, on GPUs, a snapshot of the memory for pytorch.org/memory_viz.
    """
    check_extra("train", "steadytrain profile")
    from steadytrain.components.observe.profile import Profile
    from steadytrain.components.preprocess.step import run as prepare
    from steadytrain.components.shared.config import load
    from steadytrain.components.shared.errors import Stopped, TrainingFailed
    from steadytrain.components.shared.workspace import Workspace
    from steadytrain.components.train.step import check_complete
    from steadytrain.components.train.step import run as train
    from steadytrain.pipelines.interrupts import say
    from steadytrain.pipelines.lock import run_lock
    from steadytrain.pipelines.plugin_checks import check_plugins
    from steadytrain.pipelines.sources import open_source

    chosen = open_source(source, given(overrides, run=name, output=output)).config
    last = warm_up + steps
    settings = {
        "run": profile_name(chosen.run_id),
        "training.max_steps": last,
        "training.profile.steps": [warm_up + 1, last],
        "training.logging_steps": 1,
        "training.eval_steps": last,
        "training.save_steps": last,
        "recovery.checkpoints": None,
    }
    config = load(chosen.to_yaml(), settings)
    check_plugins(config)
    workspace = Workspace.of(config)
    workspace.create()
    try:
        with run_lock(workspace):
            _remove_profile(workspace)
            outcome = train(config, prepare(config))
        if outcome.failure is not None:
            failure = outcome.failure
            raise TrainingFailed(
                failure.message, failure_class=failure.failure_class, remedy=failure.remedy
            )
        check_complete(outcome)
    except Stopped:
        say("stopped before the profile was complete; the same command starts it again")
        raise
    found = Profile.of(config)
    if as_json:
        changes = [{"change": item.text, "gain": item.gain} for item in found.changes()]
        folder = str(found.folder)
        json_output.show({"shares": found.shares(), "changes": changes, "folder": folder})
    else:
        typer.echo("\n".join(found.lines()))


def _remove_profile(workspace: Workspace) -> None:
    """Remove an earlier profile, which would count as the trained part of this run.

    Raises:
        BadInput: there is a run of that name that is not a profile.
    """
    from steadytrain.components.shared.config import load
    from steadytrain.components.shared.errors import BadInput

    known = workspace.config.exists()
    if known and load(workspace.config).training.profile.steps is None:
        raise BadInput(
            f"run {workspace.run_id!r} exists and is not a profile",
            remedy="give this profile another name with --run",
        )
    shutil.rmtree(workspace.folder)
