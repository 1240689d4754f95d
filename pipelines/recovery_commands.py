"""The commands for a run that stopped or failed on its way: resume, explain, gc."""

from __future__ import annotations

from typing import Annotated

import typer

from steadytrain.pipelines.options import DEFAULT_OUTPUT, YEAR, Output, RunName, at_most


def resume(name: RunName, output: Output = DEFAULT_OUTPUT) -> None:
    """Continue a run that stopped or failed, with its own stored configuration.

    Completed work is not repeated: training resumes from the newest verified checkpoint. The run
    may have been stopped, killed or preempted, or may have failed. First fix what its error names
    (`steadytrain explain RUN`). To continue with other settings, edit the file
    OUTPUT/runs/RUN/config.yaml. Settings that determine the weights cannot change within a run.
    """
    from steadytrain.pipelines.light_kfp import import_kfp
    from steadytrain.pipelines.local import run_locally
    from steadytrain.pipelines.outline import tell_ending
    from steadytrain.pipelines.progress import ProgressDisplay
    from steadytrain.pipelines.runs import find_run, state_of

    config, workspace = find_run(output, name)
    if state_of(workspace).state == "finished":
        typer.echo(
            f"{name} is finished; `steadytrain report {name} -o {output}` shows what happened"
        )
        return
    import_kfp()
    tell_ending(run_locally(config, display=ProgressDisplay()))


def explain(name: RunName, output: Output = DEFAULT_OUTPUT) -> None:
    """Summarize in ten lines what happened in a run, its current state, and what to do next.

    Shows the training attempts, how each failure happened, what was decided and changed, the newest
    checkpoint, and where the time went. Also works on an active run.
    """
    from steadytrain.components.report.explain import explain as explained
    from steadytrain.pipelines.runs import find_workspace, state_of

    workspace = find_workspace(output, name)
    running = state_of(workspace).state == "running"
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
) -> None:
    """Remove what ended runs no longer need: checkpoints, data, and unpromoted model versions.

    A finished run loses all its checkpoints, since its model is stored separately. If you train it
    further, or train it again, it starts at step 0. A run that can be resumed keeps its newest
    verified checkpoint, newer ones, and the best one. A model version is removed if its run
    registered it as a candidate, it was never champion, and no alias points to it now. Prepared
    data are removed once every run that used them is finished; a later run prepares them again. It
    keeps active runs, runs that were active recently (even if recovery.checkpoints is elsewhere),
    and past and present champions.
    """
    from steadytrain.components.report.words import size
    from steadytrain.pipelines.gc import garbage

    total = count = 0
    for item in garbage(output, idle_seconds=idle_hours * 3600):
        if not dry_run and not item.remove():
            typer.echo(f"kept {item.what}: its run is active again")
            continue
        typer.echo(f"{'would remove' if dry_run else 'removed'} {item.what}, {size(item.bytes)}")
        count, total = count + 1, total + item.bytes
    if not count:
        typer.echo(f"nothing to remove in {output}")
        return
    typer.echo(
        f"{size(total)} in all{'; run it without --dry-run to remove them' if dry_run else ''}"
    )
