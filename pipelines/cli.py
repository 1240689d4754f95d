"""The `steadytrain` command. Slow modules are imported only where they are used."""

from __future__ import annotations

import json
import shlex
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from steadytrain.components.shared.errors import RunBusy
from steadytrain.components.shared.stopping import stoppable
from steadytrain.pipelines import (
    doctor_command,
    plan_command,
    recovery_commands,
    schedule_commands,
    submit_command,
    trigger_commands,
    unexpected,
)
from steadytrain.pipelines.options import (
    DEFAULT_OUTPUT,
    YEAR,
    Output,
    Overrides,
    Pipeline,
    RunName,
    Source,
    at_most,
)

if TYPE_CHECKING:
    from steadytrain.components.shared.config import RunConfig

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Training pipelines that finish: preprocess, train, evaluate, compare with the champion, "
    "register.\n\nStart with `steadytrain run causal-lm`, or write a configuration: `steadytrain "
    "schema` lists every field.\n\nA run that breaks recovers by itself. If it cannot, "
    "`steadytrain explain RUN` shows why and what to do, and `steadytrain resume RUN` continues "
    "from its newest checkpoint.",
)


def _tell_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(version("steadytrain"))
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_tell_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    pass


@app.command()
def run(
    source: Source = "causal-lm",
    overrides: Overrides = [],  # noqa: B006  typer copies it
    name: Annotated[
        str, typer.Option("--run", help="Name of the run. The same name continues the same run.")
    ] = "",
    output: Annotated[
        str,
        typer.Option(
            "--output", "-o", help="Folder for the run, instead of the configuration's `output`."
        ),
    ] = "",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what the run would do, and exit.")
    ] = False,
) -> None:
    """Run the pipeline on this machine, or continue a run that stopped.

    The same configuration continues the same run. Completed work is not repeated.
    """
    config = _load(source, overrides, run=name, output=output)
    if dry_run:
        from steadytrain.pipelines.outline import outline

        typer.echo("\n".join(outline(config)))
        return
    from steadytrain.pipelines.light_kfp import import_kfp
    from steadytrain.pipelines.local import run_locally
    from steadytrain.pipelines.outline import tell_ending
    from steadytrain.pipelines.progress import ProgressDisplay

    import_kfp()
    tell_ending(run_locally(config, display=ProgressDisplay()))


@app.command("list")
def list_(output: Output = DEFAULT_OUTPUT) -> None:
    """List the runs in an output folder."""
    from rich.console import Console
    from rich.table import Table

    from steadytrain.pipelines.runs import list_runs

    table = Table("run", "state", "step", "started", box=None, pad_edge=False)
    runs = list(list_runs(output))
    for item in runs:
        started = f"{datetime.fromtimestamp(item.started):%Y-%m-%d %H:%M}" if item.started else ""
        table.add_row(item.run_id, item.state, item.step, started)
    if not table.row_count:
        typer.echo(f"no runs in {output}")
        return
    Console().print(table)
    for item in runs:
        for problem in item.damage:
            typer.echo(f"{item.run_id}: {problem}")


@app.command()
def stop(
    name: RunName,
    output: Output = DEFAULT_OUTPUT,
    grace: Annotated[
        float,
        typer.Option(min=0, callback=at_most(YEAR), help="Seconds to wait for the run to stop."),
    ] = 60,
) -> None:
    """Stop a run on this machine. It saves a checkpoint, and you can continue it later."""
    from steadytrain.pipelines.local import stop_run
    from steadytrain.pipelines.runs import find_workspace

    workspace = find_workspace(output, name)
    if stop_run(workspace, grace_seconds=grace):
        typer.echo(f"stopped {name}; continue it with {_continue(name, output)}")
    else:
        typer.echo(f"{name} is not running")


for command in (recovery_commands.resume, recovery_commands.explain, recovery_commands.gc):
    app.command()(command)


@app.command()
def report(name: RunName, output: Output = DEFAULT_OUTPUT) -> None:
    """Summarize what happened in a run, and write its HTML report again."""
    from steadytrain.components.report.step import run as write_report
    from steadytrain.components.report.step import write_page
    from steadytrain.components.report.summary import summary
    from steadytrain.pipelines.lock import run_lock
    from steadytrain.pipelines.runs import find_run

    config, workspace = find_run(output, name)
    try:
        with run_lock(workspace):
            write_report(config)
    except RunBusy:
        write_page(workspace)
    typer.echo("\n".join([*summary(workspace), f"report: {workspace.report}"]))


@app.command("compile")
def compile_(
    output: Annotated[Path, typer.Option("--output", "-o", help="The YAML file to write.")],
    pipeline: Pipeline = "finetune",
    fuse: Annotated[
        bool, typer.Option("--fuse", help="Put everything after training into one step.")
    ] = False,
) -> None:
    """Write the pipeline as YAML that the Kubeflow UI and the kfp SDK accept as is.

    Anything that would break on a server is an error, and anything unwise there is a warning. Each
    comes with its location and a fix: retry windows that end before the task does, images without a
    version, KFP's cache, secrets in parameters, tasks without limits.
    """
    from steadytrain.pipelines.compile import compile_pipeline

    path = compile_pipeline(
        output, lambda finding: typer.echo(str(finding), err=True), pipeline=pipeline, fuse=fuse
    )
    typer.echo(f"wrote {path}")


app.command()(plan_command.plan)
app.command()(submit_command.submit)
app.command()(trigger_commands.trigger)
app.command()(trigger_commands.watch)
app.add_typer(schedule_commands.app, name="schedule")


@app.command()
def validate(
    source: Source,
    overrides: Overrides = [],  # noqa: B006  typer copies it
    show: Annotated[
        bool, typer.Option("--show", help="Print the full configuration, including defaults.")
    ] = False,
) -> None:
    """Check a configuration and report every problem at once."""
    config = _load(source, overrides)
    typer.echo(config.to_yaml().rstrip() if show else f"valid: run {config.run_id}")


@app.command()
def schema() -> None:
    """Print the JSON Schema of the configuration: every field with its values and its default."""
    from steadytrain.components.shared.config import RunConfig

    typer.echo(json.dumps(RunConfig.model_json_schema(), indent=2))


@app.command()
def presets() -> None:
    """List the configurations that ship with steadytrain."""
    from steadytrain.components.shared.config import load, preset_names

    for name in preset_names():
        config = load(name)
        typer.echo(f"{name}: {config.data.task} on {', '.join(config.data.source)}")


app.command()(doctor_command.doctor)


@app.command()
def step(
    name: Annotated[
        str, typer.Argument(help="preprocess, train, evaluate, register, promote or report.")
    ],
    source: Source,
    overrides: Overrides = [],  # noqa: B006  typer copies it
) -> None:
    """Run one step alone, on what the earlier steps wrote to the run's folder."""
    from steadytrain.pipelines.steps import run_step

    typer.echo(run_step(name, _load(source, overrides)))


def main() -> None:
    """Run the command. Errors and stops end it with a message and an exit status of their own."""
    with unexpected.told(), stoppable():
        app()


def _load(source: str, overrides: list[str], **options: str) -> RunConfig:
    """Load a configuration. `options` are the fields that have their own command-line option."""
    from steadytrain.components.shared.config import load

    given = {field: value for field, value in options.items() if value}
    return load(source, [*overrides, *given.items()])


def _continue(name: str, output: Path) -> str:
    place = "" if output == DEFAULT_OUTPUT else f" --output {shlex.quote(str(output))}"
    return f"steadytrain resume {name}{place}"


if __name__ == "__main__":
    main()
