"""The commands about a configuration itself: validate, schema, presets."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from steadytrain.components.shared.errors import BadInput
from steadytrain.pipelines import json_output, options
from steadytrain.pipelines.json_output import Json
from steadytrain.pipelines.options import DataSource, Overrides, Run, RunOutput, given

if TYPE_CHECKING:
    from steadytrain.pipelines.explain_field import Explained


def validate(
    source: DataSource = "",
    overrides: Overrides = [],  # noqa: B006  typer copies it
    run: Run = None,
    output: RunOutput = None,
    show: Annotated[
        bool, typer.Option("--show", help="Print the full configuration, including defaults.")
    ] = False,
    explain: Annotated[
        str,
        typer.Option(
            metavar="FIELD",
            autocompletion=options.fields,
            help="Explain a field or a section: type, values, default, its value here and where "
            "that comes from, and what a change affects.",
        ),
    ] = "",
    as_json: Json = False,
) -> None:
    """Check a configuration and report every problem at once.

    Files, folders and packages that it names must be on this machine. Addresses on S3, on a hub or
    in MLflow are not opened.

    With --explain, it needs no configuration: `steadytrain validate --explain training.max_steps`
    """
    from steadytrain.components.shared.workspace import Workspace
    from steadytrain.pipelines.addresses import check_here
    from steadytrain.pipelines.explain_field import explained
    from steadytrain.pipelines.plugin_checks import check_plugins
    from steadytrain.pipelines.remarks import anywhere, here
    from steadytrain.pipelines.sources import open_source

    if not source and explain:
        _show(explained(explain), as_json=as_json)
        return
    if not source:
        raise BadInput("no configuration is given", remedy="name a YAML file, a preset, or data")
    chosen = open_source(source, given(overrides, run=run, output=output))
    for remark in chosen.remarks:
        typer.echo(remark, err=True)
    config = chosen.config
    Workspace.of(config)  # rejects an output that cannot be a folder
    check_plugins(config)
    for remark in (*here(config), *anywhere(config)):
        typer.echo(remark, err=True)
    if explain:
        _show(explained(explain, chosen), as_json=as_json)
        return
    for remark in check_here(config):
        typer.echo(remark, err=True)
    if as_json:
        content = {"run": config.run_id, "configuration": config.model_dump(mode="json")}
        json_output.show({"valid": True, **content})
    else:
        typer.echo(config.to_yaml().rstrip() if show else f"valid: run {config.run_id}")


def _show(told: Explained, *, as_json: bool) -> None:
    json_output.show(told.as_data()) if as_json else typer.echo("\n".join(told.lines()))


def schema() -> None:
    """Print every field of a configuration as JSON Schema."""
    from steadytrain.components.shared.config import RunConfig

    typer.echo(json.dumps(RunConfig.model_json_schema(), indent=2))


def presets(as_json: Json = False) -> None:
    """List the configurations that ship with steadytrain."""
    from steadytrain.components.shared.config import load, preset_names

    found = [
        {"name": name, "task": config.data.task, "source": config.data.source}
        for name, config in ((name, load(name)) for name in preset_names())
    ]
    if as_json:
        json_output.show({"presets": found})
        return
    for item in found:
        typer.echo(f"{item['name']}: {item['task']} on {', '.join(item['source'])}")
