"""Run a study until it is complete, as the commands `tune` and `ablate` and the tune step do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.records import DataRecord
from steadytrain.components.shared.stopping import stoppable
from steadytrain.components.tune.driver import Watcher, drive, study_folder
from steadytrain.components.tune.history import Params
from steadytrain.components.tune.log import Log
from steadytrain.components.tune.results import write_results
from steadytrain.components.tune.steps import with_steps
from steadytrain.components.tune.study import Study
from steadytrain.components.tune.study_page import render, write_page
from steadytrain.components.tune.tracking import tracked
from steadytrain.components.tune.trials.cluster import trials_for
from steadytrain.components.tune.trials.data import share_data


def write_study(study: Study, folder: Path) -> None:
    """Write the results of a search and their page."""
    write_results(study, folder)
    write_page(render(study), folder)


def search(
    config: RunConfig,
    log: Log,
    watcher: Watcher,
    tell: Callable[[str], object],
    *,
    write: Callable[[Study, Path], None] = write_study,
    first: Callable[[], Sequence[Params]] = list,
    data: DataRecord | None = None,
) -> Study:
    """Run or continue a study until it is complete.

    Args:
        log: of the study, which this process holds (`driving`).
        tell: receives further lines for people, such as why a trial on a cluster waits.
        write: writes the results to the study's folder, however the study ends.
        first: see `Study`.
        data: prepared data for the trials. None means that the first trial prepares them.

    Raises:
        ConfigError, DataError: see `with_steps`.
        Stopped: this process was asked to stop. The study can be continued.
        TooManyFailed, BadInput, StorageError: see `drive` and `Study`.
    """
    folder = study_folder(config)
    config = with_steps(config, log, folder, tell, data)
    study = Study(config, log, first=first)
    if data is not None:
        share_data(folder, config, data)
    trials = trials_for(folder, config, tell)
    try:
        with stoppable() as stopping, tracked(study, watcher) as watchers:
            drive(study, trials, watchers, stopping.check)
    finally:
        write(study, folder)
    return study
