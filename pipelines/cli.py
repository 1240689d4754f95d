"""The `steadytrain` command. Everything slow is imported where it is used."""

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
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Training pipelines that finish: preprocess, train, evaluate, compare with the "
    "champion, register.\n\nBegin with `steadytrain run causal-lm`, or write a configuration: "
    "`steadytrain schema` lists every field.\n\nA run that breaks recovers by itself. Where it "
    "could not: `steadytrain explain RUN` tells why and what to do, `steadytrain resume RUN` "
    "goes on from its newest checkpoint.",
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
        typer.Option("--version", callback=_tell_version, is_eager=True, help="Print it."),
    ] = False,
) -> None:
    pass


@app.command()
def run(
    source: Source = "causal-lm",
    overrides: Overrides = [],  # noqa: B006  typer copies it
    name: Annotated[str, typer.Option("--run", help="Name of the run; the same continues.")] = "",
    output: Annotated[str, typer.Option("--output", "-o", help="Overrides `output`.")] = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be done.")] = False,
) -> None:
    """Run the pipeline on this machine, or continue a run that stopped.

    The same configuration continues the same run: what is done is not done again.
    """
    config = _load(source, overrides, run=name, output=output)
    if dry_run:
        from steadytrain.pipelines.outline import outline

        typer.echo("\n".join(outline(config)))
        return
    from steadytrain.components.shared.progress import Progress
    from steadytrain.pipelines.local import run_locally
    from steadytrain.pipelines.outline import tell_ending

    tell_ending(run_locally(config, display=Progress()))


@app.command("list")
def list_(output: Output = DEFAULT_OUTPUT) -> None:
    """List the runs of an output folder."""
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
        float, typer.Option(min=0, callback=at_most(YEAR), help="Seconds to wait for it.")
    ] = 60,
) -> None:
    """Stop a run that works on this machine; it saves a checkpoint and can be continued."""
    from steadytrain.pipelines.local import stop_run
    from steadytrain.pipelines.runs import find_workspace

    workspace = find_workspace(output, name)
    if stop_run(workspace, grace_seconds=grace):
        typer.echo(f"stopped {name}; continue it with {_continue(name, output)}")
    else:
        typer.echo(f"nobody works on {name}")


for command in (recovery_commands.resume, recovery_commands.explain, recovery_commands.gc):
    app.command()(command)


@app.command()
def report(name: RunName, output: Output = DEFAULT_OUTPUT) -> None:
    """Tell what happened in a run, and write its HTML report anew."""
    from steadytrain.components.report.step import run as write_report
    from steadytrain.components.report.step import write_page
    from steadytrain.components.report.summary import summary
    from steadytrain.components.shared.lock import run_lock
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
        bool, typer.Option("--fuse", help="One step for all that follows the training.")
    ] = False,
) -> None:
    """Write the pipeline as YAML, which the Kubeflow UI and the kfp SDK take as it is.

    What would break on a server is refused, and what is unwise there is told, each with its
    place and a remedy: retries that end before the task does, images without a version, KFP's
    cache, secrets in parameters, tasks without limits.
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
    show: Annotated[bool, typer.Option("--show", help="Print it, defaults included.")] = False,
) -> None:
    """Check a configuration and report every problem at once."""
    config = _load(source, overrides)
    typer.echo(config.to_yaml().rstrip() if show else f"valid: run {config.run_id}")


@app.command()
def schema() -> None:
    """Print the JSON Schema of the configuration: every field, its values and its default."""
    from steadytrain.components.shared.config import RunConfig

    typer.echo(json.dumps(RunConfig.model_json_schema(), indent=2))


@app.command()
def presets() -> None:
    """List the configurations that come with the product."""
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
    """Run one step alone, on what the steps before it left in the run's folder."""
    from steadytrain.pipelines.steps import run_step

    typer.echo(run_step(name, _load(source, overrides)))


def main() -> None:
    """Entry point: every end of the command, a stop included, has its message and its status."""
    with unexpected.told(), stoppable():
        app()


def _load(source: str, overrides: list[str], **options: str) -> RunConfig:
    """A configuration; `options` name fields that have an option of their own."""
    from steadytrain.components.shared.config import load

    given = {field: value for field, value in options.items() if value}
    return load(source, [*overrides, *given.items()])


def _continue(name: str, output: Path) -> str:
    place = "" if output == DEFAULT_OUTPUT else f" --output {shlex.quote(str(output))}"
    return f"steadytrain resume {name}{place}"


if __name__ == "__main__":
    main()
