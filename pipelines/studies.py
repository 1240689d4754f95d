"""Run a study until it is complete, as `steadytrain tune` and `steadytrain ablate` do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from steadytrain.components.shared.errors import BadInput, Stopped

if TYPE_CHECKING:
    from steadytrain.components.shared.config import RunConfig
    from steadytrain.components.tune.driver import Watcher
    from steadytrain.components.tune.history import Params
    from steadytrain.components.tune.study import Study


def run_study(
    config: RunConfig,
    watcher: Watcher,
    write: Callable[[Study, Path], None],
    *,
    first: Callable[[], Sequence[Params]] = list,
) -> tuple[Study, Path]:
    """Run or continue a study on this machine. Return it with its folder.

    Args:
        write: writes its results to its folder; called also if the study was stopped.
        first: see `Study`.

    Raises:
        Stopped: the process was asked to stop; the same command continues the study.
        SteadytrainError: see `driving`, `Study` and `drive`.
    """
    from steadytrain.components.shared.stopping import stoppable
    from steadytrain.components.tune.driver import drive, driving, study_folder
    from steadytrain.components.tune.study import Study
    from steadytrain.components.tune.tracking import tracked
    from steadytrain.components.tune.trials.local import local_trials
    from steadytrain.pipelines.interrupts import say

    folder = study_folder(config)
    with driving(config) as log:
        study = Study(config, log, first=first)
        trials = local_trials(folder, parallel=config.tune.budget.parallel)
        try:
            with stoppable() as stopping, tracked(study, watcher) as watchers:
                drive(study, trials, watchers, stopping.check)
        except Stopped:
            say("stopped; nothing is lost: the same command continues the study")
            raise
        finally:
            write(study, folder)
    return study, folder


def check_installed(package: str, purpose: str) -> None:
    """Check that a package of the extra `train` is installed.

    Raises:
        BadInput: it is not.
    """
    if find_spec(package) is None:
        raise BadInput(
            f"{purpose} the package {package}, which is not installed",
            remedy="pip install 'steadytrain[train]'",
        )
