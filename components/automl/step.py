"""The step that searches: what a search is as a study, and what its end means."""

from __future__ import annotations

import json
import math
import shutil
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from steadytrain.components.automl.board import Board, board_of, mean_loss, members_of
from steadytrain.components.automl.design import (
    as_automl,
    described,
    first_configurations,
    new_design,
    shared_imports,
)
from steadytrain.components.automl.judgment import judged
from steadytrain.components.automl.report import finish, write_search
from steadytrain.components.automl.results import BOARD, FIGURES, lines
from steadytrain.components.automl.time_limit import TimeLimit
from steadytrain.components.shared.config import RunConfig, from_parameters, load
from steadytrain.components.shared.config.tune import AblationConfig
from steadytrain.components.shared.errors import BadInput, SteadytrainError
from steadytrain.components.shared.quantities import duration
from steadytrain.components.shared.stage import stage
from steadytrain.components.shared.workspace import Workspace
from steadytrain.components.train.launch.launcher import jobs_for
from steadytrain.components.train.launch.own_pod import with_task
from steadytrain.components.tune.driver import driving, study_folder
from steadytrain.components.tune.log import open_log
from steadytrain.components.tune.results import BEST, WINNER, Lines
from steadytrain.components.tune.search import search
from steadytrain.components.tune.step import report_study
from steadytrain.components.tune.study import Study, logs_address, study_name, study_of

if TYPE_CHECKING:
    from kfp import dsl


def named(config: RunConfig) -> RunConfig:
    """Return a configuration that is a search's, and whose run and study have one name."""
    quality = config.automl.quality or "good"
    return config.model_copy(
        update={
            "run": config.run_id,
            "tune": config.tune.model_copy(update={"space": {}}),
            "ablation": AblationConfig(),
            "automl": config.automl.model_copy(update={"quality": quality}),
        }
    )


def of_search(config: RunConfig) -> dict[str, Any]:
    """Return the arguments of `tune.search.search` that make a study a search.

    Args:
        config: of the study (`as_automl`).
    """
    return {
        "write": partial(write_search, epochs=config.training.max_steps <= 0),
        "first": partial(first_configurations, config),
        "design": new_design(study_folder(config), mean_loss, members_of),
        "imports": shared_imports(config),
    }


def won(study: Study, folder: Path) -> Board:
    """Return the board of a search that has ended.

    Raises:
        BadInput: its time is too short for any.
        SteadytrainError: it has no winner.
    """
    board = board_of(study, folder)
    hours = study.config.automl.budget.hours
    if board is None and hours is not None and study.out_of_time:
        least = TimeLimit(study.config, study.history, list, list).least(study.elapsed)
        raise BadInput(
            f"automl.budget.hours = {hours:g}: the search has no winner, since nothing can be "
            f"trained on all folds, judged and registered in {duration(hours * 3600)} here",
            remedy=f"set it to {math.ceil(least / 36) / 100:g} or more, and run the same command "
            "again: the search continues",
        )
    if board is None or not board.weights:
        rows = () if board is None else board.rows
        missed = [
            f"{it.configuration.name} misses a limit: {it.missed}" for it in rows if it.missed
        ]
        usd = study.config.automl.budget.usd
        spent = f"automl.budget.usd = {usd:g} is spent" if usd and study.spent_out() else ""
        why = "; ".join(missed) or spent or lines(board)[-1]
        raise SteadytrainError(
            f"the search has no winner: {why}",
            remedy=f"see {folder / BOARD}; raise automl.budget, with which the same command "
            "continues the search, or relax automl.constraints, with which a new one starts",
        )
    return board


def run(config: RunConfig) -> Study:
    """Run the search step. Its lines go to the step's output.

    It prepares the folds itself; the preprocess step before it has checked the data.

    Raises:
        RunBusy: another driver works on the study. This step then reports nothing.
        BadInput, DataError: see `as_automl` and `first_configurations`.
        SteadytrainError: as for `search` and `won`.
    """
    config = as_automl(named(config), in_pods=jobs_for(config.compute) is not None)
    with driving(config) as log, stage(config, "search") as current:
        shown = Lines(_print, described(config))
        study = search(config, log, shown, _print, **of_search(config))
        board = won(study, study_folder(config))
        for line in lines(board):
            _print(line)
        members = ", ".join(board.rows[index].configuration.name for index in board.weights)
        current.summary = (
            f"the best of {len(board.rows)} configurations: {members}; loss {board.corrected:.4g}"
        )
        return study


def judge(config: RunConfig) -> bool:
    """Add to the board and its page how its winner was judged, if it was. Return whether it was."""
    folder = study_folder(config)
    if not (folder / WINNER).is_file():
        return False
    workspace = Workspace.of(load(folder / WINNER))
    if not workspace.record("gate").is_file():
        return False
    log = open_log(logs_address(config), study_name(config))
    known, _ = study_of(log.read())
    study = Study(known, log, design=new_design(folder, mean_loss, members_of))
    if missed := finish(study, won(study, folder), folder, judged(workspace)):
        _print(f"MLflow has no report of the search: {missed}")
    return True


def _print(line: str) -> None:
    print(line, flush=True)


def kfp_search(
    *,
    resolved: dsl.Artifact,
    study: dsl.Artifact,
    best: dsl.Artifact,
    board: dsl.Artifact,
    result: dsl.Metrics,
    task: dsl.TaskConfig | None,
) -> None:
    """Run the search step."""
    config = named(load(Path(resolved.path)))
    run(with_task(config, task))
    Path(study.path).write_bytes(config.to_saved())
    folder = study_folder(config)
    for name, artifact in ((BEST, best), (BOARD, board)):
        shutil.copyfile(folder / name, artifact.path)
    content = json.loads((folder / BOARD).read_bytes())
    best.metadata.update(study=content["study"], **content["best_params"])
    for name in FIGURES:
        result.log_metric(name, content[name])


def kfp_report(*, page: dsl.HTML, **parameters: Any) -> None:
    """Report on the search's run and on its winner's. The page is that of the search's run."""
    config = named(from_parameters(**parameters))
    try:
        judge(config)
    finally:
        report_study(config, parameters["job"], page)
