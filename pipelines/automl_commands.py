"""`steadytrain automl`: search for the best model of some data, train it, and judge it once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from steadytrain.pipelines import options
from steadytrain.pipelines.options import Json, Overrides, RunOutput, check_extra, with_options

if TYPE_CHECKING:
    from steadytrain.components.shared.config import RunConfig


def automl(
    source: Annotated[
        str,
        typer.Argument(
            help="A preset's name, the path of a YAML file, or data, whose column to predict is "
            "named by --set data.target=COLUMN: a file, a folder, a glob, s3:// or package:NAME.",
            autocompletion=options.sources,
        ),
    ] = "",
    overrides: Overrides = [],  # noqa: B006  typer copies it
    run: Annotated[
        str | None, typer.Option("--run", help="Name of the search. The same name continues it.")
    ] = None,
    output: RunOutput = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Show the portfolio, the units and the cost, and exit."),
    ] = False,
    as_json: Json = False,
) -> None:
    """Find the best model of a table, series, images or texts, and train it as an ordinary run.

    Three fields suffice: data.source, data.target and name; a folder of images needs no target. A
    unit trains one configuration on all folds but one and predicts the records of that one. First
    comes a fixed portfolio, from linear models to boosted trees, or of networks; automl.quality
    says how much. The records' out-of-fold predictions choose an ensemble, or one network. It is
    trained again on everything but the test side, which is opened once, for the gate.

    The search can be stopped or killed at any time: the same command continues it, and loses one
    unit at most. The result is in OUTPUT/studies/NAME: board.json, and best.yaml, with which
    `steadytrain run` trains the same model without a search.
    """
    from steadytrain.components.automl.design import as_automl
    from steadytrain.pipelines.early_checks import check_here, check_plugins
    from steadytrain.pipelines.searches import searched

    check_extra("train", "steadytrain automl")
    config, remarks = searched(source, with_options(overrides, run=run, output=output))
    for remark in remarks:
        typer.echo(remark, err=True)
    config = as_automl(config)
    check_plugins(config)
    check_here(config)
    if dry_run:
        _outline(config, as_json=as_json)
    else:
        _automl(config, as_json=as_json)


def _automl(config: RunConfig, *, as_json: bool) -> None:
    from steadytrain.components.automl.design import described
    from steadytrain.components.automl.report import finish
    from steadytrain.components.automl.results import BOARD, lines, summary
    from steadytrain.components.automl.step import of_search, won
    from steadytrain.components.automl.time_limit import time_line
    from steadytrain.components.tune.driver import study_folder
    from steadytrain.components.tune.results import BEST, Lines
    from steadytrain.components.tune.study_page import PAGE
    from steadytrain.pipelines.study_commands import run_study

    folder = study_folder(config)
    notify: Callable[[str], object] = (lambda _: None) if as_json else typer.echo
    shown = Lines(notify, described(config))
    study = run_study(config, shown, notify, **of_search(config))
    board = won(study, folder)
    if not as_json:
        typer.echo("\n".join([*lines(board), f"board: {folder / BOARD}", ""]))
    winner = _trained(folder / BEST, quiet=as_json)
    if missed := finish(study, board, folder, winner):
        typer.echo(f"MLflow has no report of the search: {missed}", err=True)
    if not as_json:
        typer.echo(f"report: {folder / PAGE}")
        if text := time_line(config, study.elapsed):
            typer.echo(text)
    if as_json:
        took = {"command_seconds": round(study.elapsed, 3)}
        options.show({**summary(study, board), **winner, **took, "folder": str(folder)})


def _winners_run(config: RunConfig) -> str | None:
    """Return the name of a winner's run; None if the search has none.

    A search that is continued may have another winner, and a run keeps its configuration.
    """
    from steadytrain.components.shared.digest import value_digest

    if config.run is None:
        return None
    own = [part.model_dump(mode="json") for part in (config.model, config.training)]
    return f"{config.run}-{value_digest(own)[:8]}"


def _trained(best: Path, *, quiet: bool) -> dict[str, Any]:
    """Train the winner as an ordinary run, and return how it was judged."""
    from steadytrain.components.automl.judgment import judged
    from steadytrain.components.automl.judgment import lines as judgment_lines
    from steadytrain.components.shared.config import load
    from steadytrain.components.shared.workspace import Workspace
    from steadytrain.pipelines.local import run_locally
    from steadytrain.pipelines.outline import print_ending
    from steadytrain.pipelines.progress import ProgressDisplay
    from steadytrain.pipelines.runs import run_lock

    config = load(best)
    config = config.model_copy(update={"run": _winners_run(config)})
    workspace = Workspace.of(config)
    workspace.create()
    with run_lock(workspace) as lock:
        ended = run_locally(config, lock, display=ProgressDisplay())
    if not quiet:
        print_ending(ended, as_json=False)
    elif ended.exit_code:
        raise typer.Exit(ended.exit_code)
    result = judged(workspace)
    if not quiet:
        typer.echo("\n".join(judgment_lines(result)))
    return result


def _outline(config: RunConfig, *, as_json: bool) -> None:
    from steadytrain.components.automl.plan import as_plain, lines, plan

    planned = plan(config)
    if as_json:
        options.show(as_plain(config, planned))
    else:
        typer.echo("\n".join(lines(config, planned)))
