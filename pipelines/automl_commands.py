"""`steadytrain automl`: search for the best model of a table, train it, and judge it once."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from steadytrain.components.shared.errors import BadInput
from steadytrain.pipelines import options
from steadytrain.pipelines.options import Json, Overrides, RunOutput, check_extra, with_options

if TYPE_CHECKING:
    from steadytrain.components.shared.config import RunConfig
    from steadytrain.components.shared.config.load import Override


def automl(
    source: Annotated[
        str,
        typer.Argument(
            help="A preset's name or the path of a YAML file. Without one, name the data with "
            "--set data.source=[FILE] and --set data.target=COLUMN.",
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
    """Find the best model of a table, or ensemble of models, and train it as an ordinary run.

    Three fields suffice: data.source, data.target and name. A unit trains one configuration on all
    folds but one and predicts the records of that one. First comes a fixed portfolio, from linear
    models to boosted trees; automl.quality says how much. The records' out-of-fold predictions
    choose the ensemble. It is trained again on everything but the test side, which is opened once,
    for the gate.

    The search can be stopped or killed at any time: the same command continues it, and loses one
    unit at most. The result is in OUTPUT/studies/NAME: board.json, and best.yaml, with which
    `steadytrain run` trains the same model without a search.
    """
    from steadytrain.components.automl.design import as_automl
    from steadytrain.pipelines.early_checks import check_here, check_plugins

    check_extra("train", "steadytrain automl")
    config, remarks = _configured(source, with_options(overrides, run=run, output=output))
    for remark in remarks:
        typer.echo(remark, err=True)
    config = as_automl(config)
    check_plugins(config)
    check_here(config)
    if dry_run:
        _outline(config, as_json=as_json)
    else:
        _automl(config, as_json=as_json)


def _configured(source: str, overrides: list[Override]) -> tuple[RunConfig, list[str]]:
    """Return the configuration of a run, whose task is inferred, and what was chosen.

    Raises:
        BadInput: no data or no target are named, or they cannot be read.
        ConfigError: with every problem.
    """
    from steadytrain.components.automl.task import task_of
    from steadytrain.components.shared.config import from_mapping
    from steadytrain.components.shared.config.data import TABLES
    from steadytrain.components.shared.config.document import assign
    from steadytrain.components.shared.config.load import override_items, read_mapping
    from steadytrain.pipelines.sources import name_for

    content, remarks = read_mapping(source) if source else {}, list[str]()
    for field, value in override_items(overrides):
        assign(content, field, value)
    data = content.setdefault("data", {})
    for field in ("source", "target"):
        if not data.get(field):
            raise BadInput(
                f"data.{field} is missing: a search needs a table and the column to predict",
                remedy="add --set data.source=[FILE] --set data.target=COLUMN",
            )
    first = data["source"] if isinstance(data["source"], str) else data["source"][0]
    content.setdefault("name", name_for(str(first)))
    content.setdefault("model", {"framework": "lightgbm", "config": {"model_type": "lightgbm"}})
    data.setdefault("validation_share", 0.1)
    data.setdefault("test_share", 0.2)
    if "task" not in data:
        data["task"], reason = task_of(data)
        remarks.append(f"task {data['task']}, since {reason}; data.task sets another one")
    config = from_mapping(content)
    if config.data.task not in TABLES:
        raise BadInput(
            f"data.task = {config.data.task!r}: a search finds models of tables",
            remedy=f"use {' or '.join(TABLES)}",
        )
    return config, remarks


def _automl(config: RunConfig, *, as_json: bool) -> None:
    from steadytrain.components.automl.board import (
        BOARD,
        board_of,
        fold_score,
        lines,
        summary,
        write_board,
    )
    from steadytrain.components.automl.design import (
        described,
        first_configurations,
        new_design,
        shared_imports,
    )
    from steadytrain.components.shared.errors import SteadytrainError
    from steadytrain.components.tune.driver import study_folder
    from steadytrain.components.tune.results import BEST, Lines
    from steadytrain.pipelines.studies import run_study

    folder = study_folder(config)
    notify: Callable[[str], object] = (lambda _: None) if as_json else typer.echo
    study = run_study(
        config,
        Lines(notify, described(config)),
        notify,
        write=write_board,
        first=partial(first_configurations, config),
        design=new_design(folder, fold_score),
        imports=shared_imports(config),
    )
    board = board_of(study, folder)
    if board is None or not board.weights:
        raise SteadytrainError(
            "the search has no winner: " + "; ".join(lines(board)[-1:]),
            remedy=f"see {folder / BOARD}; raise automl.budget or relax automl.constraints, and "
            "run the same command again: the search continues",
        )
    if not as_json:
        typer.echo("\n".join([*lines(board), f"board: {folder / BOARD}", ""]))
    found = _trained(folder / BEST, quiet=as_json)
    if as_json:
        options.show({**summary(study, board), **found, "folder": str(folder)})


def _trained(best: Path, *, quiet: bool) -> dict[str, Any]:
    """Train the winner as an ordinary run, and return how it was judged."""
    from steadytrain.components.automl.judgment import add_judgment, judged
    from steadytrain.components.automl.judgment import lines as judgment_lines
    from steadytrain.components.shared.config import load
    from steadytrain.components.shared.workspace import Workspace
    from steadytrain.pipelines.local import run_locally
    from steadytrain.pipelines.outline import print_ending
    from steadytrain.pipelines.progress import ProgressDisplay
    from steadytrain.pipelines.runs import run_lock

    config = load(best)
    workspace = Workspace.of(config)
    workspace.create()
    with run_lock(workspace) as lock:
        ended = run_locally(config, lock, display=ProgressDisplay())
    if not quiet:
        print_ending(ended, as_json=False)
    elif ended.exit_code:
        raise typer.Exit(ended.exit_code)
    found = judged(workspace)
    if not quiet:
        typer.echo("\n".join(judgment_lines(found)))
    add_judgment(found, best.parent)
    return found


def _outline(config: RunConfig, *, as_json: bool) -> None:
    from steadytrain.components.automl.plan import as_plain, lines, plan

    found = plan(config)
    if as_json:
        options.show(as_plain(config, found))
    else:
        typer.echo("\n".join(lines(config, found)))
