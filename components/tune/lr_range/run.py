"""Train a range test, and keep what it found."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.errors import BadInput, SteadytrainError
from steadytrain.components.shared.events import Cursor
from steadytrain.components.shared.events.types import AttemptEnded, TrainingStep
from steadytrain.components.shared.lease import hold
from steadytrain.components.shared.storage import LocalStorage
from steadytrain.components.train.failures import FailureClass
from steadytrain.components.tune.lr_range.curve import RangeResult, curve_of, exploded, suggested
from steadytrain.components.tune.study import studies_folder
from steadytrain.components.tune.trials.base import Trials
from steadytrain.components.tune.trials.place import TrialFolder

RESULT: Final = "lr-range.json"
_LOWEST, _HIGHEST = 1e-6, 1.0
_STEPS: Final = 120
"""20 in each of the six decades."""
_POLL_SECONDS: Final = 0.05
_TRIAL: Final = 0


def range_config(config: RunConfig) -> RunConfig:
    """Return the configuration of a range test: the run's own, but for the rate and the length."""
    training = config.training.model_copy(
        update={
            "learning_rate": _HIGHEST,
            "lr_scheduler_type": "range_test",
            "lr_scheduler_kwargs": {"lowest": _LOWEST},
            "warmup_steps": 0,
            "max_steps": _STEPS,
            "eval_steps": _STEPS,
            "save_steps": _STEPS,
            "logging_steps": 1,
            "early_stopping_patience": None,
            "load_best_model_at_end": False,
        }
    )
    # That the loss explodes is what the test waits for.
    recovery = config.recovery.model_copy(update={"spike_threshold": 0.0})
    return config.model_copy(update={"training": training, "recovery": recovery})


def range_folder(config: RunConfig) -> Path:
    """Return the folder of a configuration's range test. Other settings have another folder."""
    name, digest = config.run or config.name, range_config(config).digest()
    return studies_folder(config) / f"{name}-{digest[:8]}-lr-range"


def range_test(
    config: RunConfig, open_trials: Callable[[Path], Trials], check: Callable[[], None]
) -> RangeResult:
    """Run the test, or return what an earlier one found. Its checkpoints and its model are removed.

    Args:
        open_trials: opens the trials of a study's folder.
        check: called often; raises when this process was asked to stop.

    Raises:
        RunBusy: another process runs this test.
        BadInput: training rejected the configuration or the data.
        SteadytrainError: training failed for another reason than a diverging loss.
    """
    folder = range_folder(config)
    storage = LocalStorage(folder)
    seconds = config.recovery.lease_seconds
    with hold(storage.sub("lease"), run_id=folder.name, seconds=seconds, what="study"):
        if known := _known(storage):
            return known
        trials = open_trials(folder)
        trials.attach()
        try:
            found = _trained(range_config(config), folder, trials, check)
            storage.write(RESULT, f"{found.model_dump_json(indent=2)}\n".encode())
            trials.discard(_TRIAL)
        finally:
            trials.close()
    return found


def _known(storage: LocalStorage) -> RangeResult | None:
    """Return what an earlier test found; None if there was none, or if its file is damaged."""
    with contextlib.suppress(FileNotFoundError, ValueError):
        return RangeResult.model_validate_json(storage.read(RESULT))
    return None


def _trained(
    config: RunConfig, folder: Path, trials: Trials, check: Callable[[], None]
) -> RangeResult:
    losses = Losses(TrialFolder(folder, _TRIAL).workspace.events)
    trials.train(_TRIAL, config, config.training.max_steps)
    while True:
        check()
        # The state first: what it reports as ended has no further events.
        state = trials.state(_TRIAL)
        points = curve_of(losses.now())
        if losses.diverged or exploded(points):
            trials.stop(_TRIAL)
            return suggested(points, ended_early=True)
        if state.condition == "finished":
            return suggested(points, ended_early=False)
        if state.condition == "failed":
            kind = BadInput if state.failure == FailureClass.USER_BUG else SteadytrainError
            raise kind(state.error, remedy=f"the log is {TrialFolder(folder, _TRIAL).log}")
        time.sleep(_POLL_SECONDS)


class Losses:
    """The losses that a run reports.

    diverged: whether training diverged; later attempts with other rates do not count.
    """

    def __init__(self, events: Path) -> None:
        self._events = Cursor(events)
        self._losses = dict[int, tuple[float, float]]()
        self.diverged = False

    def now(self) -> list[tuple[float, float]]:
        """Return the rate and the loss of each step so far."""
        for event in self._events.new():
            if self.diverged:
                break
            if isinstance(event, TrainingStep):
                self._losses[event.step] = event.learning_rate, event.loss
            elif isinstance(event, AttemptEnded):
                self.diverged = event.failure_class == FailureClass.DIVERGENCE
        return [self._losses[step] for step in sorted(self._losses)]
