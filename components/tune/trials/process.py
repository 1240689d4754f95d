"""The process of a trial: it prepares the data if nobody has, and trains until the cut.

If the trial holds out a fold, it then scores the model on that fold.

Its result is in the run's files. Exit status: 0 if they say how the trial ended, also if it failed,
unless the disk is full; 143 if it was stopped, and left a checkpoint.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from steadytrain.components.shared.config import RunConfig, load
from steadytrain.components.shared.config.secrets import redact
from steadytrain.components.shared.errors import SteadytrainError
from steadytrain.components.shared.events.types import StepFailed, Warned
from steadytrain.components.shared.lifeline import die_with_parent
from steadytrain.components.shared.redaction import traceback_of
from steadytrain.components.shared.workspace import Workspace
from steadytrain.components.train.agent import forking
from steadytrain.components.train.step import run
from steadytrain.components.tune.trials.data import known_data, prepare_data
from steadytrain.components.tune.trials.place import TrialFolder

STOPPED_EXIT = 128 + signal.SIGTERM


def train_trial(study: Path, number: int, until: int, parent: int) -> int:
    """Train a trial until a step. Return the exit status.

    Args:
        until: as for `Trials.train`.
        parent: the process that started this one. If it dies, the trial stops with a checkpoint.
    """
    die_with_parent(signal.SIGTERM)
    if os.getppid() != parent:
        return 1
    place = TrialFolder(study, number)
    config = load(place.config)
    data = known_data(study, config)
    if data is None:
        # In a process of its own, because it starts threads, and this one still forks.
        status = _in_fork(partial(_prepare, study, config))
        data = known_data(study, config)
        if status or data is None:
            return status
    with _reported(config):
        outcome = run(config, data, until=until)
        if outcome.outcome in ("preempted", "stopped"):
            return STOPPED_EXIT
        if outcome.result and outcome.succeeded and config.cross_validation.fold is not None:
            # Imported late: torch and MLflow take seconds, and other trials score nothing.
            from steadytrain.components.tune.trials.held_out import score_fold

            score_fold(config, data, Path(outcome.result.model), place.scores)
    return 0


def _prepare(study: Path, config: RunConfig) -> int:
    die_with_parent()
    with _reported(config):
        prepare_data(study, config)
    return 0


def _in_fork(work: Callable[[], int]) -> int:
    fork = forking.Forked(work, dict(os.environ))
    fork.wait()
    return fork.poll() or 0


@contextlib.contextmanager
def _reported(config: RunConfig) -> Iterator[None]:
    """Turn an error into an event of the run: it would happen again."""
    try:
        yield
    except Exception as error:
        print(traceback_of(error), end="", file=sys.stderr)
        message, remedy = str(error), ""
        if isinstance(error, SteadytrainError):
            message, remedy = error.message, error.remedy
        report_failure(Workspace.of(config), type(error).__name__, message, remedy)


def report_failure(workspace: Workspace, error: str, message: str, remedy: str = "") -> None:
    """Write to a trial's events that it failed outside of its attempts."""
    with contextlib.closing(workspace.stream("trial")) as stream:
        stream.emit(StepFailed(stage="train", error=error, message=redact(message), remedy=remedy))


def warn(workspace: Workspace, message: str) -> None:
    """Write to a trial's events what its user should know."""
    with contextlib.closing(workspace.stream("trial")) as stream:
        stream.emit(Warned(stage="train", message=message))
