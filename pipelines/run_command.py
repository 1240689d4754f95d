"""`steadytrain run` and `resume`: run the pipeline on this machine, or continue a run."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from steadytrain.components.shared.errors import Stopped
from steadytrain.pipelines import options
from steadytrain.pipelines.options import (
    DEFAULT_OUTPUT,
    DataSource,
    Json,
    Output,
    Overrides,
    Run,
    RunName,
    RunOutput,
    check_extra,
    given,
)

if TYPE_CHECKING:
    from steadytrain.components.shared.config import RunConfig
    from steadytrain.components.shared.workspace import Workspace


def run(
    source: DataSource = "causal-lm",
    overrides: Overrides = [],  # noqa: B006  typer copies it
    name: Run = None,
    output: RunOutput = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what the run would do, and exit.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Run the pipeline on this machine, or continue a stopped run.

    The same configuration continues the same run. Completed work is not repeated.

    For data (a file, a folder, a glob, s3://, hub:NAME or package:NAME), a look at the first
    records finds the task: messages or prompt and completion are a chat, text and label are a
    classification, and text alone is a language model. The task's preset does the rest. If the
    records suit several tasks, the error lists them.
    """
    from steadytrain.components.shared.workspace import Workspace
    from steadytrain.pipelines.early_checks import anywhere, check_here, check_plugins
    from steadytrain.pipelines.runs import run_lock
    from steadytrain.pipelines.sources import open_source

    if not dry_run:
        check_extra("train", "steadytrain run")
    chosen = open_source(source, given(overrides, run=name, output=output))
    for remark in (*chosen.remarks, *anywhere(chosen.config)):
        typer.echo(remark, err=True)
    check_plugins(chosen.config)
    if dry_run:
        _outline(chosen.config, as_json=as_json)
        return
    workspace = Workspace.of(chosen.config)
    if not workspace.record("preprocess").exists():
        check_here(chosen.config)
    workspace.create()
    with run_lock(workspace) as lock:
        _run(chosen.config, lock, as_json=as_json)


def resume(name: RunName, output: Output = DEFAULT_OUTPUT, as_json: Json = False) -> None:
    """Continue a run that stopped or failed.

    It uses the run's own stored configuration. Completed work is not repeated: training resumes
    from the newest verified checkpoint. The run may have been stopped, killed or preempted, or may
    have failed. First fix what its error names (`steadytrain explain RUN`). To continue with other
    settings, use `steadytrain run OUTPUT/runs/RUN/config.yaml --set FIELD=VALUE`. Settings that
    determine the weights cannot change within a run.
    """
    from steadytrain.pipelines.runs import find_workspace, run_lock

    workspace = find_workspace(output, name)
    workspace.create()
    # Before everything that takes time, so that `stop` finds this command.
    with run_lock(workspace) as lock:
        _resume(workspace, lock, as_json=as_json)


def _resume(workspace: Workspace, lock: int, *, as_json: bool) -> None:
    from steadytrain.pipelines.early_checks import check_plugins
    from steadytrain.pipelines.local import LocalRun
    from steadytrain.pipelines.outline import as_data
    from steadytrain.pipelines.runs import find_run, state_of

    output, name = workspace.output, workspace.run_id
    config, _ = find_run(output, name)
    if state_of(workspace, ours=True).state == "finished":
        if as_json:
            options.show(as_data(LocalRun(workspace, True, None, None)))
        else:
            typer.echo(
                f"{name} is finished; `steadytrain report {name} -o {output}` shows what happened"
            )
        return
    check_extra("train", "steadytrain resume")
    check_plugins(config)
    _run(config, lock, as_json=as_json)


def _outline(config: RunConfig, *, as_json: bool) -> None:
    from steadytrain.components.shared.workspace import Workspace
    from steadytrain.pipelines.outline import outline

    lines = outline(config)
    if as_json:
        folder = str(Workspace.of(config).folder)
        content = {"run": config.run_id, "folder": folder}
        options.show({**content, "configuration": config.model_dump(mode="json")})
    else:
        typer.echo("\n".join(lines))


def _run(config: RunConfig, lock: int, *, as_json: bool) -> None:
    from steadytrain.components.shared.log import Log
    from steadytrain.components.shared.workspace import Workspace
    from steadytrain.pipelines.interrupts import say
    from steadytrain.pipelines.local import LocalRun, run_locally
    from steadytrain.pipelines.outline import as_data, print_ending, stopping
    from steadytrain.pipelines.progress import ProgressDisplay

    json_lines = config.observability.logs == "json"
    display = Log(config.run_id, "json") if json_lines else ProgressDisplay()
    try:
        ended = run_locally(config, lock, display=display)
    except Stopped as stopped:
        # The third signal. Checkpoints that were saved before are still good.
        workspace = Workspace.of(config)
        say("\n".join(stopping(workspace)))
        if as_json:
            options.show(as_data(LocalRun(workspace, False, stopped.number, None)))
        raise
    # With JSON lines, standard output has nothing else, so the ending goes to standard error.
    print_ending(replace(ended, shown=ended.shown and not json_lines), as_json=as_json)
