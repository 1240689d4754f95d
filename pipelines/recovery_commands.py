"""The commands for runs that have ended, or failed on their way: explain, gc."""

from __future__ import annotations

from typing import Annotated

import typer

from steadytrain.pipelines import json_output
from steadytrain.pipelines.json_output import Json
from steadytrain.pipelines.options import DEFAULT_OUTPUT, YEAR, Output, RunName, at_most


def explain(name: RunName, output: Output = DEFAULT_OUTPUT, as_json: Json = False) -> None:
    """Show in ten lines what happened in a run and what to do.

    Shows the training attempts, how each failure happened, what was decided and changed, the newest
    checkpoint, and where the time went. Also works on an active run.
    """
    from steadytrain.components.report.explain import as_data
    from steadytrain.components.report.explain import explain as explained
    from steadytrain.pipelines.runs import find_workspace, is_running

    workspace = find_workspace(output, name)
    running = is_running(workspace)
    if as_json:
        json_output.show(as_data(workspace, running=running))
    else:
        typer.echo("\n".join(explained(workspace, running=running)))


def gc(
    output: Output = DEFAULT_OUTPUT,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List what would be removed, but remove nothing.")
    ] = False,
    idle_hours: Annotated[
        float,
        typer.Option(
            min=0,
            callback=at_most(YEAR / 3600),
            help="Keep runs that were active within this many hours.",
        ),
    ] = 24,
    as_json: Json = False,
) -> None:
    """Remove what ended runs no longer need.

    That is checkpoints, data, and unpromoted model versions. A finished run loses all its
    checkpoints, since its model is stored separately. If you train it further, or train it again,
    it starts at step 0. A run that can be resumed keeps its newest verified checkpoint, newer ones,
    and the best one. A model version is removed if its run registered it as a candidate, it was
    never champion, and no alias points to it now. Prepared data are removed once every run that
    used them is finished; a later run prepares them again. A study loses what its ended trials left
    and, once none is paused, its data. It keeps active runs, runs that were
    active recently (even if recovery.checkpoints is elsewhere), and past and present champions.
    """
    from steadytrain.components.shared.quantities import size
    from steadytrain.pipelines.gc import garbage

    found: list[dict[str, str | int]] = []
    for item in garbage(output, idle_seconds=idle_hours * 3600):
        if not dry_run and not item.remove():
            if not as_json:
                typer.echo(f"kept {item.what}: it is in use again")
            continue
        found.append({"what": item.what, "bytes": item.bytes})
        if not as_json:
            done = "would remove" if dry_run else "removed"
            typer.echo(f"{done} {item.what}, {size(item.bytes)}")
    total = sum(int(item["bytes"]) for item in found)
    if as_json:
        json_output.show({"dry_run": dry_run, "removed": found, "bytes": total})
    elif not found:
        typer.echo(f"nothing to remove in {output}")
    else:
        typer.echo(
            f"{size(total)} in all{'; run it without --dry-run to remove them' if dry_run else ''}"
        )
