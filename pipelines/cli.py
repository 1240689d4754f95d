"""The `steadytrain` command. Slow modules are imported only where they are used."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import typer
from typer.core import TyperGroup

from steadytrain.components.shared.errors import BadInput
from steadytrain.components.shared.stopping import stoppable
from steadytrain.pipelines import (
    automl_commands,
    config_commands,
    design_commands,
    doctor_command,
    model_commands,
    options,
    plan_commands,
    run_commands,
    schedule_commands,
    study_commands,
    submit_commands,
    unexpected,
)
from steadytrain.pipelines.options import (
    Json,
    Overrides,
    Pipeline,
    Run,
    RunOutput,
    Source,
    with_options,
)

LESSONS: Final = {
    "Begin": (
        "init",
        "validate",
        "plan",
        "run",
        "design",
        "show-data",
        "profile",
        "automl",
        "tune",
        "ablate",
        "cross-validate",
    ),
    "Follow and continue": (
        "list",
        "top",
        "ui",
        "explain",
        "report",
        "compare",
        "lineage",
        "extract",
        "check",
        "predict",
        "serve",
        "stop",
        "resume",
        "adjust",
        "gc",
    ),
    "On a cluster": ("doctor", "submit", "schedule", "trigger", "watch", "compile"),
    "Look up": ("presets", "schema", "step"),
}


class Lessons(TyperGroup):
    """A group that lists its commands under headings."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the commands in the order of the lessons."""
        known = super().list_commands(ctx)
        ordered = [name for names in LESSONS.values() for name in names]
        return sorted(known, key=ordered.index)

    def format_commands(self, _: Any, formatter: Any) -> None:
        """Write one list of commands for each heading."""
        width = formatter.width - 6 - max(map(len, self.commands))
        for heading, names in LESSONS.items():
            commands = [(name, self.commands[name]) for name in names if name in self.commands]
            with formatter.section(heading):
                formatter.write_dl(
                    [(name, command.get_short_help_str(width)) for name, command in commands],
                    col_max=max(map(len, self.commands)),
                )


app = options.Commands(
    cls=Lessons,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Training pipelines that finish: preprocess, train, evaluate, compare with the champion, "
    "register.\n\nTry it: `steadytrain run causal-lm`. With your own data: `steadytrain init` "
    "asks for data and model and writes a configuration; `steadytrain plan FILE` shows what it "
    "needs; `steadytrain run FILE` runs it.\n\nA run that breaks recovers by itself. If it "
    "cannot, `steadytrain explain RUN` shows why and what to do, and `steadytrain resume RUN` "
    "continues from its newest checkpoint.",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(version("steadytrain"))
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    pass


def compile_(
    output: Annotated[Path, typer.Option("--output", "-o", help="The YAML file to write.")],
    pipeline: Pipeline = "finetune",
    fuse: Annotated[
        bool, typer.Option("--fuse", help="Put everything after training into one step.")
    ] = False,
    check: Annotated[
        Literal["kubeflow", "vertex"],
        typer.Option(
            help="The server that is to run it. vertex also lists what Vertex AI Pipelines rejects "
            "or ignores; if it rejects anything, the exit status is 1."
        ),
    ] = "kubeflow",
) -> None:
    """Write the pipeline as YAML for Kubeflow.

    The Kubeflow UI and the kfp SDK accept the file as is. Anything that would break on a server is
    an error, and anything unwise there is a warning. Each comes with its location and a fix: retry
    windows that end before the task does, images without a version, KFP's cache, secrets in
    parameters, tasks without limits.
    """
    from steadytrain.components.shared.config.operations import PipelineConfig
    from steadytrain.pipelines.compile import compile_pipeline, read_pipeline

    path = compile_pipeline(
        output,
        lambda finding: typer.echo(str(finding), err=True),
        pipeline=pipeline,
        shape=PipelineConfig(fuse=fuse),
    )
    typer.echo(f"wrote {path}")
    if check == "vertex":
        from steadytrain.pipelines.compile import lint_vertex

        findings = lint_vertex(*read_pipeline(path))
        for finding in findings:
            typer.echo(str(finding), err=True)
        if any(finding.unsafe for finding in findings):
            raise typer.Exit(1)


def step(
    name: Annotated[
        str,
        typer.Argument(
            help="preprocess, tune, search, cross-validate, train, evaluate, register, promote or "
            "report."
        ),
    ],
    source: Source,
    overrides: Overrides = [],  # noqa: B006  typer copies it
    run: Run = None,
    output: RunOutput = None,
    as_json: Json = False,
) -> None:
    """Run one step alone.

    It works on what the earlier steps wrote to the run's folder. Its warnings go to standard error.
    """
    from steadytrain.components.shared.config import load
    from steadytrain.pipelines.steps import as_plain, as_text, reported_warnings, run_step

    config = load(source, with_options(overrides, run=run, output=output))
    with reported_warnings(config):
        written = run_step(name, config)
    if as_json:
        records = {key: as_plain(item) for key, item in written.items()}
        options.show({"run": config.run_id, "step": name, "records": records})
    else:
        typer.echo("\n".join(map(as_text, written.values())))


app.command()(config_commands.init)
app.command()(config_commands.validate)
app.command("show-data")(model_commands.show_data)
app.command()(design_commands.design)
app.command()(plan_commands.plan)
app.command()(plan_commands.profile)
app.command()(run_commands.run)
app.command()(automl_commands.automl)
app.command()(study_commands.tune)
app.command()(study_commands.ablate)
app.command()(study_commands.cross_validate)
app.command("list")(run_commands.list_)
app.command()(run_commands.top)
app.command()(run_commands.ui)
app.command()(run_commands.explain)
app.command()(run_commands.report)
app.command()(run_commands.compare)
app.command()(model_commands.lineage)
app.command()(model_commands.extract)
app.command()(model_commands.check)
app.command()(model_commands.predict)
app.command()(model_commands.serve)
app.command()(run_commands.stop)
app.command()(run_commands.adjust)
app.command()(run_commands.resume)
app.command()(run_commands.gc)
app.command("compile")(compile_)
app.command()(submit_commands.submit)
app.command()(submit_commands.trigger)
app.command()(submit_commands.watch)
app.add_typer(schedule_commands.app, name="schedule")
app.command()(doctor_command.doctor)
app.command()(config_commands.presets)
app.command()(config_commands.schema)
app.command()(step)


def main() -> None:
    """Run the command. Errors and stops end it with a message and an exit status of their own."""
    as_json = options.is_requested(sys.argv[1:])
    with unexpected.exit_with_status(as_json=as_json), stoppable():
        app() if not as_json else sys.exit(_for_programs())


def _for_programs() -> int:
    """Run the command, but leave the errors of its arguments to `unexpected`, which writes JSON."""
    try:
        return int(app(standalone_mode=False) or 0)
    except Exception as error:
        # Typer's own errors. The module of their classes depends on its version.
        if not hasattr(error, "format_message"):
            raise
        raise BadInput(error.format_message(), remedy="add --help to see the options") from error


if __name__ == "__main__":
    main()
