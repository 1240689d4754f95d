"""The driver: the one process that decides what trains, and the only one that appends to the log.

It writes each decision down before it acts on it. So a driver that is started again knows what was
going on: it takes over the trials that still train, starts the others again from their
checkpoints, and repeats nothing.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, Protocol

from steadytrain.components.shared.append_log import Record
from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.digest import file_digest
from steadytrain.components.shared.errors import (
    ConfigError,
    DataError,
    SteadytrainError,
    StorageError,
)
from steadytrain.components.shared.lease import Lease, hold
from steadytrain.components.shared.quantities import size
from steadytrain.components.shared.stage import check_room
from steadytrain.components.shared.storage import Storage, open_storage
from steadytrain.components.shared.workspace import Workspace
from steadytrain.components.train.failures import FailureClass
from steadytrain.components.tune.designs import is_cross_validation
from steadytrain.components.tune.history import Trial
from steadytrain.components.tune.log import Log, open_log
from steadytrain.components.tune.study import (
    Study,
    logs_address,
    studies_folder,
    study_name,
)
from steadytrain.components.tune.trials.base import Trials, TrialState
from steadytrain.components.tune.trials.folder import TrialFolder

_POLL_SECONDS: Final = 0.1
_HURRY_SECONDS: Final = 1.0
"""How long a trial may save a checkpoint when wall time is up, or when it hangs."""


class TooManyFailed(SteadytrainError):
    """More trials failed than `tune.max_failed_share` allows."""


class Watcher(Protocol):
    """Shows what happens in a study. It must not raise."""

    def resumed(self, study: Study) -> None:
        """Show a study that continues."""

    def started(self, study: Study, trial: Trial) -> None:
        """Show that a trial began, or went on after a pause."""

    def ended(self, study: Study, trial: Trial) -> None:
        """Show that a trial paused at a rung, finished or failed."""


def study_folder(config: RunConfig) -> Path:
    """Return the folder of a configuration's study."""
    return studies_folder(config) / study_name(config)


@contextlib.contextmanager
def driving(config: RunConfig) -> Iterator[Log]:
    """Hold a study for this process, and yield its log.

    Raises:
        RunBusy: another driver holds it; the message says which one, where, and since when.
        BadInput: the disk has too little space for a run, as the winner of the study is one.
        BadInput, StorageError: see `hold`.
    """
    check_room(Workspace.of(config))
    name, seconds = study_name(config), config.recovery.lease_seconds
    with hold(lease_of(config), run_id=name, seconds=seconds, what="study") as lease:
        yield _Fenced(open_log(logs_address(config), name), lease)


def lease_of(config: RunConfig) -> Storage:
    """Return where a study's driver holds its lease."""
    return open_storage(logs_address(config)).sub(f"{study_name(config)}/lease")


def drive(
    study: Study,
    trials: Trials,
    watcher: Watcher,
    check: Callable[[], None],
    *,
    poll_seconds: float = _POLL_SECONDS,
) -> None:
    """Train until the study is complete or its budget is spent.

    Args:
        check: called often; raises when this process was asked to stop. The trials' processes are
            then ended, and the study can be continued.
        poll_seconds: time between two looks at the trials.

    Raises:
        TooManyFailed: see there. The study can be continued with a larger `max_failed_share`.
        BadInput: validations have no such metric as the objective.
        StorageError: a trial failed because its storage did, as all others would. It does not count
            as failed, and continues with the study.
        DataError: the data cannot be prepared for a fold, and so for none.
    """
    _take_over(study, trials)
    watcher.resumed(study)
    within = math.inf
    try:
        while True:
            check()
            unreported, reported = _collect(study, trials, watcher)
            for number in study.discard():
                trials.discard(number)
            if failures := study.too_many_failed():
                raise _too_many(study, failures)
            if study.spent_out(unreported):
                within = _HURRY_SECONDS if study.out_of_time else math.inf
                return
            _fill(study, trials, watcher)
            if not study.running:
                return
            if not reported:
                time.sleep(poll_seconds)
    finally:
        trials.close(within=within)


def _take_over(study: Study, trials: Trials) -> None:
    """Bring the trials into the state that the log describes."""
    for number in trials.attach() - study.running.keys():
        trials.stop(number)
    for trial in study.history.trials:
        if trial.status in ("finished", "failed", "discarded"):
            trials.discard(trial.number)
    for number in list(study.running):
        _train(study, trials, number)


def _collect(study: Study, trials: Trials, watcher: Watcher) -> tuple[float, bool]:
    """Write down what trials have reached.

    Returns:
        The seconds that running trials have spent since their last report, and whether any trial
        reported.
    """
    unreported, reported = 0.0, False
    for number, trial in list(study.running.items()):
        state = study.pace(trial.params).counted(trials.state(number)).at(trial.until)
        if _settled(study, trials, trial, state):
            watcher.ended(study, trial)
            reported = True
        else:
            unreported += max(0.0, state.seconds - trial.seconds)
            if state.condition in ("new", "paused"):
                _train(study, trials, number)
            elif killed := _to_kill(study, trials, trial, state):
                failure, reason, within = killed
                trials.stop(number, within=within)
                study.fail(number, failure, reason, seconds=state.seconds)
                trials.discard(number)
                watcher.ended(study, trial)
                reported = True
    return unreported, reported


def _to_kill(
    study: Study, trials: Trials, trial: Trial, state: TrialState
) -> tuple[FailureClass, str, float] | None:
    """Return the class and the reason if a running trial is to be killed, and how soon."""
    most = study.most_memory
    if math.isfinite(most) and (taken := trials.memory(trial.number, most)) > most:
        # While it saves a checkpoint, it would take more.
        reason = f"killed with {size(taken)} of memory: it may take {size(most)}"
        return FailureClass.HOST_OOM, reason, 0.0
    if reason := study.overdue(trial, state.since_prepared):
        return FailureClass.HANG, reason, _HURRY_SECONDS
    return None


def _settled(study: Study, trials: Trials, trial: Trial, state: TrialState) -> bool:
    """Write down that a trial reached its rung or ended; return whether it did."""
    if state.condition == "failed":
        if state.failure == FailureClass.STORAGE:
            raise _storage_failed(trial, state)
        if (
            state.failure == FailureClass.DATA
            and not state.seconds
            and is_cross_validation(study.config)
        ):
            # It never began: all folds are of the same data, so none would.
            raise DataError(
                state.error,
                remedy="correct the data, or the field that it names, and give the study another "
                "name (--run)",
            )
        study.fail(trial.number, state.failure, state.error, seconds=state.seconds)
    elif state.condition == "finished" or (
        # Killed at the end of its schedule, it did not finish: only then is there a model.
        state.condition == "paused" and trial.until <= state.step < study.rungs.cuts[-1]
    ):
        path = TrialFolder(study_folder(study.config), trial.number).scores
        study.report(trial.number, state, file_digest(path) if path.is_file() else "")
    else:
        return False
    if trial.status != "paused":
        trials.discard(trial.number)
    return True


def _fill(study: Study, trials: Trials, watcher: Watcher) -> None:
    """Start trials until as many train as may."""
    while len(study.running) < study.tune.budget.parallel:
        result = study.next()
        if result is None:
            return
        trial = study.history.trials[result.number]
        if _train(study, trials, result.number):
            watcher.started(study, trial)
        else:
            watcher.ended(study, trial)
            if study.too_many_failed():
                return


def _train(study: Study, trials: Trials, number: int) -> bool:
    """Train a trial until its rung; return False if its configuration is impossible."""
    trial = study.history.trials[number]
    try:
        config = study.trial_config(trial.params)
    except ConfigError as error:
        # Each value is possible by itself, which was checked, but not this combination.
        study.fail(number, "bad_input", str(error))
        return False
    trials.train(number, config, study.pace(trial.params).trial_step(trial.until))
    return True


def _too_many(study: Study, failures: str) -> TooManyFailed:
    last = [trial for trial in study.history.trials if trial.status == "failed"][-1]
    return TooManyFailed(
        f"{failures}; the last one, trial {last.number}: {last.error or last.failure}",
        remedy="fix what it names, raise tune.max_failed_share, and run the same command again: "
        "the study continues. Trials that have failed still count",
    )


def _storage_failed(trial: Trial, state: TrialState) -> StorageError:
    return StorageError(
        f"the study stopped because the storage of trial {trial.number} failed: {state.error}",
        remedy="free space, or check that the storage can be reached, and run the same command "
        "again: the trial and the study continue",
    )


class _Fenced:
    """A log that only the holder of the lease appends to."""

    def __init__(self, log: Log, lease: Lease) -> None:
        self._log, self._lease = log, lease
        self.read = log.read

    def append(self, *records: Record) -> None:
        self._lease.fence()
        self._log.append(*records)
