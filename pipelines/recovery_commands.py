"""The commands for a run that did not go straight on: resume, explain, gc."""

from __future__ import annotations

from typing import Annotated

import typer

from steadytrain.pipelines.options import DEFAULT_OUTPUT, YEAR, Output, RunName, at_most


def resume(name: RunName, output: Output = DEFAULT_OUTPUT) -> None:
    """Continue a run that stopped or failed, with its own stored configuration.

    What is done is not done again: training goes on from the newest verified checkpoint. The run
    may have been stopped, killed, preempted, or have failed; mend first what its error names
    (`steadytrain explain RUN`). To continue with other settings, change the file
    OUTPUT/runs/RUN/config.yaml; what decides the weights cannot change within a run.
    """
    from steadytrain.components.shared.progress import Progress
    from steadytrain.pipelines.local import run_locally
    from steadytrain.pipelines.outline import tell_ending
    from steadytrain.pipelines.runs import find_run, state_of

    config, workspace = find_run(output, name)
    if state_of(workspace).state == "finished":
        typer.echo(f"{name} is finished; `steadytrain report {name} -o {output}` tells of it")
        return
    tell_ending(run_locally(config, display=Progress()))


def explain(name: RunName, output: Output = DEFAULT_OUTPUT) -> None:
    """Tell in ten lines what happened in a run, where it stands, and what to do next.

    The attempts at training, how each that failed did so, what was decided and changed, the
    newest checkpoint, and where the time went. Works on a run that is still at work, too.
    """
    from steadytrain.components.report.explain import explain as explained
    from steadytrain.pipelines.runs import find_workspace, state_of

    workspace = find_workspace(output, name)
    running = state_of(workspace).state == "running"
    typer.echo("\n".join(explained(workspace, running=running)))


def gc(
    output: Output = DEFAULT_OUTPUT,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List what would be removed, remove nothing.")
    ] = False,
    idle_hours: Annotated[
        float,
        typer.Option(
            min=0,
            callback=at_most(YEAR / 3600),
            help="Leave runs alone that gave a sign of life within this time.",
        ),
    ] = 24,
) -> None:
    """Remove what ended runs no longer need: checkpoints, data, model versions passed over.

    Of a finished run all checkpoints go, since its model is kept apart; training it further, or
    once more, then begins at step 0. Of a run that can be resumed all go but the newest verified
    one, newer ones, and the best. A model version goes where its run registered it as candidate,
    it never was champion, and no alias names it now. Prepared data go once every run that used
    them is finished; a later run prepares them again. Left alone: runs at work, runs with a sign
    of life of late, also where their checkpoints lie elsewhere (recovery.checkpoints), champions
    past and present.
    """
    from steadytrain.components.report.words import size
    from steadytrain.pipelines.gc import litter

    total = count = 0
    for item in litter(output, idle_seconds=idle_hours * 3600):
        if not dry_run and not item.remove():
            typer.echo(f"kept {item.what}: its run is at work again")
            continue
        typer.echo(f"{'would remove' if dry_run else 'removed'} {item.what}, {size(item.bytes)}")
        count, total = count + 1, total + item.bytes
    if not count:
        typer.echo(f"nothing to remove in {output}")
        return
    typer.echo(f"{size(total)} in all{'; without --dry-run they go' if dry_run else ''}")
