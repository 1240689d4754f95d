"""What the exit handler of the pipeline `tune` does: it cleans up, and writes the pages."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from steadytrain.components.report.facts import gather
from steadytrain.components.report.notify import notify
from steadytrain.components.report.step import run as report
from steadytrain.components.report.step import write_page
from steadytrain.components.report.story import outcome
from steadytrain.components.shared.config import RunConfig, load
from steadytrain.components.shared.errors import BadInput, StorageError
from steadytrain.components.shared.lease import held
from steadytrain.components.shared.workspace import Workspace
from steadytrain.components.train.launch.removal import (
    how_terminated,
    remove_unfinished,
    remove_unfinished_below,
    works_in,
)
from steadytrain.components.tune.driver import lease_of, study_folder
from steadytrain.components.tune.log import open_log
from steadytrain.components.tune.results import BEST, WINNER
from steadytrain.components.tune.study import logs_address, study_name
from steadytrain.components.tune.trials.folder import trials_of
from steadytrain.components.tune.trials.retrain import fresh_seeds, named_after, on_seed


def conclude(config: RunConfig, job: str = "") -> Path:
    """Remove jobs that a lost step left, and report on the study's run and on its winner's.

    If a step was lost, the pipeline is submitted again. If another driver works on the study, this
    pipeline run was a second one and was refused, so only its page is written.

    Args:
        job: KFP's id of the run; "" if this is not a step of a pipeline.

    Returns:
        The path of the page of the study's run.

    Raises:
        StorageError: the page cannot be written.
    """
    workspace, folder = Workspace.of(config), study_folder(config)
    problems, driven, progress = _cleaned_up(config, job)
    if driven:
        write_page(workspace)
        return workspace.report
    for run in _runs_on_seeds(config):
        problems += remove_unfinished(run, job)
    for problem in problems:
        print(f"not removed: {problem}", file=sys.stderr)
    page = _reported(config, job, progress=progress)
    if (folder / WINNER).is_file():
        # A pipeline run is submitted again at most once, here or there.
        finished = outcome(gather(workspace)).state == "finished"
        _reported(load(folder / WINNER), job if finished else "")
    return page


def _cleaned_up(config: RunConfig, job: str) -> tuple[list[str], bool, int]:
    """Remove the jobs of trials that nobody supervises any more.

    Returns:
        What could not be removed; whether a driver works on the study; and how much its log holds.
    """
    try:
        lease = lease_of(config)
        problems = remove_unfinished_below(config, trials_of(study_folder(config)), lease, job)
        log = open_log(logs_address(config), study_name(config))
        stopped = bool(job and how_terminated()) and works_in(lease, job)
        return problems, held(lease) and not stopped, len(log.read())
    except (BadInput, StorageError) as error:
        # The pages still show why the study stopped.
        return [error.message], False, 0


def _reported(config: RunConfig, job: str, *, progress: int | None = None) -> Path:
    try:
        return report(config, job, progress=progress)
    finally:
        notify(Workspace.of(config))


def _runs_on_seeds(config: RunConfig) -> Iterator[RunConfig]:
    """Yield the runs that train the best configuration again, as far as they have begun."""
    place = study_folder(config) / BEST
    if not place.is_file():
        return
    best = named_after(config, load(place))
    for seed in fresh_seeds(best, config.tune.seeds):
        run = on_seed(best, seed, compared=0)
        if Workspace.of(run).events.exists():
            yield run
