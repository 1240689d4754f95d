"""The process of a trial, and the template that trials are forked from: `python -m ... MODULE...`.

A trial is an ordinary run: its process holds the run's lease, prepares the data if nobody has, and
trains until the cut. If the trial holds out a fold, it then scores the model on that fold. Its
result is in the run's files. It outlives its driver: the next one of the study finds it by its
lease. If there is none for LINGER seconds, the trial stops with a checkpoint.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from steadytrain.components.shared import plugins
from steadytrain.components.shared.config import RunConfig, load
from steadytrain.components.shared.config.data_sections import SEARCHED, TABLES
from steadytrain.components.shared.config.secrets import redact
from steadytrain.components.shared.environment import code_origin
from steadytrain.components.shared.errors import RunBusy, SteadytrainError
from steadytrain.components.shared.events import read_events
from steadytrain.components.shared.events.stream import prepare_validators
from steadytrain.components.shared.events.types import StepFailed, TrainingFinished, Warned
from steadytrain.components.shared.periodic import Periodic
from steadytrain.components.shared.processes import Identity, set_title
from steadytrain.components.shared.records import DataRecord
from steadytrain.components.shared.redaction import traceback_of
from steadytrain.components.shared.stopping import die_with_parent
from steadytrain.components.shared.workspace import Workspace
from steadytrain.components.sizing.hardware import all_gpus
from steadytrain.components.train.agent import forking
from steadytrain.components.train.agent.fork_server import SERVE, requests_of
from steadytrain.components.train.agent.processes import MARK
from steadytrain.components.train.launch.process import agent_forked_early
from steadytrain.components.train.recovery.takeover import LeasedRun, hold_run
from steadytrain.components.train.step import run
from steadytrain.components.tune.trials.folder import (
    ARTIFACT,
    EXPLAINED,
    LABELS,
    PEAK,
    TrialFolder,
    driver_of,
    known_data,
    prepare_data,
)

PROGRAM: Final = "steadytrain.components.tune.trials.process"
_LOOK_SECONDS = 0.2
_SOONER: Final = 500
"""How much sooner the kernel ends a trial than other processes, in thousandths of its memory."""


def main(arguments: Sequence[str]) -> int:
    """Be the template that trials are forked from, or a trial. Return the exit status.

    The arguments of a trial are the study's folder, the trial's number, its `until` as for
    `Trials.train`, and how many seconds it trains without a driver.
    """
    if arguments[0] != SERVE:
        return _train_trial(arguments)
    die_with_parent()
    # The driver has marked this process with the folder of the study's trials.
    set_title(f"trials of {Path(os.environ[MARK]).parent.name}")
    # Read now, and not in each trial: all are kept.
    all_gpus()
    plugins.names(plugins.TASKS)
    code_origin()
    prepare_validators()
    forking.prepare(arguments[2:])
    requests = requests_of(arguments[1], forkable=forking.possible())
    request = requests.fork_each(PROGRAM)
    if request is not None:
        forking.leave(_train_trial(request.arguments))
    return 0


def _train_trial(arguments: Sequence[str]) -> int:
    study, number, until = Path(arguments[0]), int(arguments[1]), int(arguments[2])
    driver, trial_folder = _Driver(study, float(arguments[3])), TrialFolder(study, number)
    config = load(trial_folder.config)
    set_title(f"trial {number} of {study.name}")
    # If the machine's memory runs out, the kernel ends trials rather than their driver.
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(f"{_SOONER}\n", encoding="ascii")
    data = known_data(study, config) or _prepared(study, config, driver)
    if data is None:
        return 1
    # Ranks on this machine need an agent, and a process with threads cannot fork one.
    local = config.compute.launcher == "process"
    early = agent_forked_early() if local else contextlib.nullcontext()
    with _reported(config), early as agent:
        Periodic("driver", driver.look, every=_LOOK_SECONDS)
        with hold_run(config) as lease:
            outcome = run(config, data, until=until, leased=LeasedRun(lease, agent))
            scored = outcome.result is not None and outcome.succeeded
            if scored and config.cross_validation.fold is not None:
                assert outcome.result is not None
                score_fold(config, data, Path(outcome.result.model), trial_folder.scores)
    return 0


def score_fold(config: RunConfig, data: DataRecord, model: Path, target: Path) -> None:
    """Score an exported model on the records that the trial holds out.

    Write a Parquet file with the columns of `Scorer.score`, unless it is there.

    Args:
        data: of the trial. Its test side is the fold.

    Raises:
        SteadytrainError: as for `judged_records` and `score_candidate`.
    """
    if target.exists():
        return
    # Imported late: torch and MLflow take seconds, and other trials score nothing.
    from steadytrain.components.evaluate.paired import store_table
    from steadytrain.components.evaluate.scoring import judged_records, score_candidate
    from steadytrain.components.tasks.base import OpenTask

    task = OpenTask(config, data)
    records = judged_records(config, data)
    table, _ = score_candidate(config, task, model, records, lambda _: None)
    ended = (
        event.memory_peak
        for event in read_events(Workspace.of(config).events)
        if isinstance(event, TrainingFinished)
    )
    files = {LABELS: json.dumps(data.labels).encode(), PEAK: b"%d" % max(ended, default=0)}
    if config.data.task in SEARCHED:
        files[ARTIFACT] = task.packager.measured(model, records).model_dump_json().encode()
        files[EXPLAINED] = _explained(config, model, records)
    store_table(target, table.replace_schema_metadata(files))


def _explained(config: RunConfig, model: Path, records: Any) -> bytes:
    if config.data.task not in TABLES:
        return b"null"
    from steadytrain.components.tabular.explained import explain
    from steadytrain.components.tabular.model import load as load_table

    found = explain(load_table(model), records, config.cross_validation.fold or 0)
    return found.model_dump_json().encode()


class _Driver:
    """The driver of a trial, as the trial sees it."""

    def __init__(self, study: Path, linger_seconds: float) -> None:
        self._record, self._seconds = driver_of(study), linger_seconds
        self._seen = time.monotonic()

    def gone(self) -> bool:
        """Return whether there has been no driver for too long."""
        with contextlib.suppress(SteadytrainError):
            if Identity.load(self._record).alive():
                self._seen = time.monotonic()
        return time.monotonic() - self._seen > self._seconds

    def look(self) -> bool:
        """Ask this process to stop if the driver is gone. Return whether it is there."""
        if gone := self.gone():
            os.kill(os.getpid(), signal.SIGTERM)
        return not gone


def _prepared(study: Path, config: RunConfig, driver: _Driver) -> DataRecord | None:
    """Prepare a trial's data in a fork, because that starts threads, and this process still forks.

    Returns:
        None if it failed, or if the driver is gone.
    """
    fork = forking.Forked(partial(_prepare, study, config), dict(os.environ))
    while fork.poll() is None:
        if driver.gone():
            fork.kill()
        time.sleep(_LOOK_SECONDS / 4)
    return known_data(study, config)


def _prepare(study: Path, config: RunConfig) -> int:
    die_with_parent()
    with _reported(config):
        prepare_data(study, config)
    return 0


@contextlib.contextmanager
def _reported(config: RunConfig) -> Iterator[None]:
    """Turn an error into an event of the run: it would happen again."""
    try:
        yield
    except RunBusy as error:
        # A process of an earlier driver trains this trial. The driver finds it by its lease.
        sys.exit(str(error))
    except Exception as error:
        print(traceback_of(error), end="", file=sys.stderr)
        message, remedy = str(error), ""
        if isinstance(error, SteadytrainError):
            message, remedy = error.message, error.remedy
        report_failure(Workspace.of(config), type(error).__name__, message, remedy)


def report_failure(workspace: Workspace, error: str, message: str, remedy: str = "") -> None:
    """Write to a trial's events that it failed outside of its attempts."""
    failed = StepFailed(stage="train", error=error, message=redact(message), remedy=remedy)
    workspace.add_events("trial", failed)


def warn(workspace: Workspace, message: str) -> None:
    """Write to a trial's events what its user should know."""
    workspace.add_events("trial", Warned(stage="train", message=message))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
