"""`steadytrain schedule`: recurring runs on a Kubeflow server, declared in a file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from steadytrain.pipelines import options
from steadytrain.pipelines.options import Host, Json, Namespace

if TYPE_CHECKING:
    from steadytrain.pipelines.server.schedules import Change

app = options.Commands(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Manage recurring runs on a Kubeflow server.\n\nThey are declared in a YAML file. A "
    "file has a name, and owns the schedules on the server that carry that name. `apply` creates, "
    "replaces and deletes only those. Credentials come from the environment, as for `steadytrain "
    "submit`.",
)

File = Annotated[Path, typer.Argument(help="The YAML file with the schedules.")]
Schedule = Annotated[str, typer.Argument(metavar="NAME", help="A schedule's NAME, or SET/NAME.")]

_MARKS = {"create": "+", "replace": "~", "delete": "-", "keep": " "}


@app.command()
def apply(
    file: File,
    host: Host = "",
    namespace: Namespace = "",
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Show the changes like `diff`, but exit with status 0."),
    ] = False,
    as_json: Json = False,
) -> None:
    """Make the server's schedules match a file.

    For example:

    \b
        name: nightly
        experiment: retraining
        schedules:
        - name: support-bot
          config: chat
          overrides: {output: /mnt/shared, data.source: [s3://bucket/tickets]}
          cron: "30 3 * * MON-FRI"
          time_zone: Europe/Berlin
          daylight_saving: standard
        - name: classifier
          config: classifier.yaml
          interval: 6h
          catch_up: false
          max_concurrency: 1

    Safe to repeat: unchanged schedules are left alone. A schedule that differs is replaced, the new
    one first, and stays paused if it was paused. Each scheduled time starts a new run, which ends
    early if there is no new data. With `pipeline: finetune`, it trains every time; with
    `pipeline: tune`, it searches for better settings first.
    """  # noqa: D301  the backspace keeps the example's lines
    from steadytrain.components.shared.kubeflow.connection import connect
    from steadytrain.pipelines.server.schedules import Declaration
    from steadytrain.pipelines.server.schedules import apply as applied

    declaration = Declaration.read(file)
    server = connect(host, namespace)
    if dry_run:
        _show(declaration.plan(server, uploading=False), as_json=as_json)
        return
    changes = applied(server, declaration)
    if as_json:
        _show(changes, as_json=True)
        return
    done = {"create": "created", "replace": "replaced", "delete": "deleted", "keep": "left alone"}
    for change in changes:
        typer.echo(f"{done[change.action]} {declaration.file.name}/{change.name}")


@app.command()
def diff(file: File, host: Host = "", namespace: Namespace = "", as_json: Json = False) -> None:
    """Show what `apply` would change. The exit status is 1 if there are changes."""
    from steadytrain.components.shared.kubeflow.connection import connect
    from steadytrain.pipelines.server.schedules import Declaration

    declaration = Declaration.read(file)
    changes = declaration.plan(connect(host, namespace), uploading=False)
    _show(changes, as_json=as_json)
    if any(change.action != "keep" for change in changes):
        raise typer.Exit(1)


@app.command("list")
def list_(host: Host = "", namespace: Namespace = "", as_json: Json = False) -> None:
    """List the schedules on the server that were applied from files."""
    from rich.console import Console
    from rich.table import Table

    from steadytrain.components.shared import quantities
    from steadytrain.components.shared.kubeflow.connection import connect
    from steadytrain.pipelines.server.schedules import described, present

    listing = present(connect(host, namespace))
    if as_json:
        schedules = [
            {
                "schedule": f"{item.group}/{item.name}",
                "when": described(item)["when"],
                "enabled": bool(item.enabled),
                "since": quantities.timestamp(item.item.created_at.timestamp()),
            }
            for item in listing
        ]
        options.show({"schedules": schedules})
        return
    table = Table("schedule", "when", "state", "since", box=None, pad_edge=False)
    for item in listing:
        state = "on" if item.enabled else "paused"
        since = quantities.moment(item.item.created_at.timestamp())
        table.add_row(f"{item.group}/{item.name}", described(item)["when"], state, since)
    if not table.row_count:
        typer.echo("no steadytrain schedules on the server")
        return
    Console().print(table)


@app.command()
def pause(name: Schedule, host: Host = "", namespace: Namespace = "") -> None:
    """Pause a schedule: it starts no more runs until you resume it. Active runs continue."""
    _switch(name, host, namespace, on=False)
    typer.echo(f"paused {name}")


@app.command()
def resume(name: Schedule, host: Host = "", namespace: Namespace = "") -> None:
    """Resume a paused schedule. With catch_up, it first runs what it missed."""
    _switch(name, host, namespace, on=True)
    typer.echo(f"resumed {name}")


@app.command()
def delete(name: Schedule, host: Host = "", namespace: Namespace = "") -> None:
    """Delete a schedule from the server. Active runs continue.

    `apply` creates it again as long as its file declares it.
    """
    from steadytrain.components.shared.kubeflow.connection import connect
    from steadytrain.pipelines.server import schedules

    server = connect(host, namespace)
    for item in schedules.find(schedules.present(server), name):
        schedules.delete(server, item)
    typer.echo(f"deleted {name}")


def _switch(name: str, host: str, namespace: str, *, on: bool) -> None:
    from steadytrain.components.shared.kubeflow.connection import connect
    from steadytrain.pipelines.server import schedules

    server = connect(host, namespace)
    for item in schedules.find(schedules.present(server), name):
        schedules.switch(server, item, on=on)


def _show(changes: list[Change], *, as_json: bool) -> None:
    from steadytrain.pipelines.server.schedules import differences

    if as_json:
        schedules = [
            {"schedule": item.name, "action": item.action, "differences": list(differences(item))}
            for item in changes
        ]
        options.show({"changes": schedules})
        return
    for change in changes:
        typer.echo(f"{_MARKS[change.action]} {change.name}: {change.action}")
        if change.action in ("create", "replace"):
            typer.echo("".join(f"    {line}\n" for line in differences(change)), nl=False)
