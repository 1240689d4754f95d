"""Where the files of a study's trials are, the prepared data that they share, and their events."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import singledispatchmethod
from pathlib import Path
from typing import Final

import psutil

from steadytrain.components.shared.config import RunConfig, load
from steadytrain.components.shared.digest import file_digest, value_digest
from steadytrain.components.shared.effects import Use
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.shared.events import Event, read_events
from steadytrain.components.shared.events.types import (
    AttemptEnded,
    AttemptStarted,
    CheckpointSaved,
    DecisionMade,
    LatencyMeasured,
    StepFailed,
    SupervisorStarted,
    TrainingStep,
    Validated,
)
from steadytrain.components.shared.lease import Generations, lock
from steadytrain.components.shared.paths import Inside
from steadytrain.components.shared.records import DataRecord, Record
from steadytrain.components.shared.retry import FOREVER
from steadytrain.components.shared.storage import LocalStorage, open_storage
from steadytrain.components.shared.workspace import Workspace
from steadytrain.components.tasks.encoding.base import COLUMNS
from steadytrain.components.train.attempt import RankError
from steadytrain.components.train.failures import classify
from steadytrain.components.train.launch.job import SLACK_SECONDS
from steadytrain.components.train.recovery.outcome import SUCCESSES
from steadytrain.components.tune.trials.base import Condition, TrialState, Validation

LABELS: Final = b"labels"
"""The key of the metadata of `TrialFolder.scores` with the names of the classes, as JSON."""
ARTIFACT: Final = b"artifact"
"""The key with what the exported model costs, for tables (`tabular.artifact.Artifact`), as JSON."""
EXPLAINED: Final = b"explained"
"""The key with what it predicts when a column changes (`tabular.explained.Explained`), as JSON."""
PEAK: Final = b"memory_peak"
"""The key with the most resident bytes of the process that trained it (`TrainingFinished`)."""
_LONGEST_NAME: Final = 40
_DIGEST: Final = 8


class TrialRecord(Record):
    """What is left of a discarded trial."""

    state: TrialState


@dataclass(frozen=True)
class TrialFolder:
    """The files of one trial."""

    study: Path
    number: int

    @property
    def path(self) -> Path:
        return trials_of(self.study) / f"{self.number:04d}"

    @property
    def run(self) -> str:
        """The name of the trial's run, after which its jobs on a cluster are named.

        It contains the study's name, or a digest of it if that is no name of a run.
        """
        name = re.sub(r"[^a-z0-9]+", "-", self.study.name.lower()).strip("-")
        if name != self.study.name or len(name) > _LONGEST_NAME:
            room = _LONGEST_NAME - _DIGEST - 1
            name = f"{name[:room]}-{value_digest(self.study.name)[:_DIGEST]}".lstrip("-")
        return f"{name}-{self.number:04d}"

    config = Inside("path", "config.yaml")

    def process(self) -> psutil.Process | None:
        """Return the process on this machine that holds the trial's lease, if it runs."""
        generations = Generations(LocalStorage(self.workspace.lease))
        holder = generations.holder(generations.last())
        return None if holder is None or holder.released else holder.process()

    @property
    def stop_seconds(self) -> float:
        """How long its processes have to end after SIGTERM.

        The ranks stop, and their job on a cluster, if there is one, is removed.
        """
        recovery = load(self.config).recovery
        return 2 * (recovery.stop_grace_seconds + 2 * SLACK_SECONDS)

    log = Inside("path", "log")
    slot = Inside("path", "slot.json")
    record = Inside("path", "record.json")
    scores = Inside("path", "scores.parquet")

    def damage(self, digest: str) -> str:
        """Return what is wrong with the scores; "" if nothing is.

        Args:
            digest: of the file as the trial left it.
        """
        if not self.scores.is_file():
            return f"{self.scores} is missing"
        result = file_digest(self.scores)
        return "" if result == digest else f"{self.scores} is not as the trial left it"

    @property
    def workspace(self) -> Workspace:
        return Workspace(self.path, self.run)

    def configure(self, config: RunConfig, threads: int | None) -> None:
        """Store the trial's configuration, unless it has one.

        Args:
            threads: CPU threads per rank on this machine. A trial keeps those that it started with:
                with others, its sums would be computed in another order. None if the ranks are in
                pods on a cluster, which the configuration describes.
        """
        if self.config.is_file():
            return
        compute = config.compute
        if threads is not None:
            compute = compute.model_copy(
                update={"launcher": "process", "threads_per_rank": threads}
            )
        recovery = config.recovery
        if recovery.checkpoints is not None:
            address = f"{recovery.checkpoints.rstrip('/')}/{self.study.name}-{self.number:04d}"
            recovery = recovery.model_copy(update={"checkpoints": address})
        trial_config = config.model_copy(
            update={
                "output": str(self.path),
                "run": self.run,
                "compute": compute,
                "recovery": recovery,
            }
        )
        LocalStorage(self.path).write(self.config.name, trial_config.to_saved())

    def discard(self, state: TrialState) -> None:
        """Remove everything but the trial's state. Can be repeated if it was interrupted."""
        storage = LocalStorage(self.path)
        # Without indentation: with thousands of trials, every byte counts.
        storage.write(self.record.name, TrialRecord(state=state).model_dump_json().encode())
        if self.config.is_file():
            checkpoints = load(self.config).recovery.checkpoints
            if checkpoints is not None:
                open_storage(checkpoints).clear(self.run)
        for name in storage.folders():
            storage.clear(name)
        # The configuration last: it says where the checkpoints are.
        for path in (self.log, self.slot, self.config):
            path.unlink(missing_ok=True)

    def discarded(self) -> TrialState | None:
        """Return the state of a discarded trial; None if it is not discarded."""
        return TrialRecord.load(self.record).state if self.record.exists() else None


def find_trial(output: Path, run: str) -> TrialFolder | None:
    """Return the trial with the name of a run; None if there is none.

    Args:
        output: an output folder with studies, or the folder of a trial.
    """
    output = Path(os.path.abspath(output))  # noqa: PTH100  as in `trials_of`
    known = [TrialFolder(output.parents[1], int(output.name))] if output.name.isdecimal() else []
    for study in sorted((output / STUDIES).glob("*")):
        known += trial_folders(study)
    return next((trial for trial in known if trial.run == run and trial.path.is_dir()), None)


def template_log(study: Path) -> Path:
    """Return the file with the output of the template that trials are forked from."""
    return trials_of(study) / "log"


def driver_of(study: Path) -> Path:
    """Return the file with the identity of the process that drives the trials."""
    return trials_of(study) / "driver.json"


def trial_folders(study: Path) -> list[TrialFolder]:
    """Return the trials of a study that have a folder."""
    names = (path.name for path in trials_of(study).glob("*"))
    return [TrialFolder(study, int(name)) for name in sorted(names) if name.isdecimal()]


def trials_of(study: Path) -> Path:
    """Return the folder of a study's trials, as their processes are marked with it."""
    return Path(os.path.abspath(study)) / "trials"  # noqa: PTH100  links stay as they are


STUDIES: Final = "studies"
"""The folder of an output folder with a folder for each study."""
_RUN: Final = "prepare"
"""The run in the study's folder that prepares the data."""


def shared_data(study: Path) -> Path:
    """Return the folder of the prepared data of a study's trials."""
    return trials_of(study) / "data"


def known_data(study: Path, config: RunConfig) -> DataRecord | None:
    """Return the data of a trial; None if they are not prepared."""
    try:
        record = DataRecord.load(data_path(study, config))
    except BadInput:
        return None
    return record if Path(record.folder).is_dir() else None


def prepare_data(study: Path, config: RunConfig) -> None:
    """Prepare the data of a trial, unless they are. Another process that does so is waited for.

    Raises:
        BadInput, DataError, StorageError: as for the preprocess step.
    """
    # Imported late: not every trial prepares data, and the libraries take seconds.
    from steadytrain.components.preprocess.step import run as preprocess

    shared_config = config.model_copy(update={"output": str(study), "run": _RUN})
    _share(study, config, lambda: preprocess(shared_config))


def share_data(study: Path, config: RunConfig, data: DataRecord) -> None:
    """Give trials data that are prepared already, unless the study has its own.

    Args:
        data: the preprocess step's record for this configuration, with a folder on the same file
            system as the study.
    """
    _share(study, config, lambda: data)


def _share(study: Path, config: RunConfig, prepared: Callable[[], DataRecord]) -> None:
    path, whole = data_path(study, config), data_path(study, _without_fold(config))
    # One lock for all folds, so that the data are encoded once.
    with lock(str(path.parent), whole.stem, wait_seconds=FOREVER):
        if known_data(study, config) is None:
            share = without_test if config.cross_validation.fold is None else linked
            share(prepared(), path.with_suffix("")).save(path)


def _without_fold(config: RunConfig) -> RunConfig:
    chosen = config.cross_validation.model_copy(update={"fold": None})
    return config.model_copy(update={"cross_validation": chosen})


def without_test(data: DataRecord, folder: Path) -> DataRecord:
    """Return the record without what names the test side, or is counted from it.

    Training uses neither, so a run with this record has the same weights.

    Args:
        folder: as for `linked`.
    """
    sides = {name: side for name, side in data.sides.items() if name != "test"}
    record = data.model_copy(update={"sides": sides, "test_records": "", "profile": None})
    return linked(record, folder)


def linked(data: DataRecord, folder: Path) -> DataRecord:
    """Return the record with another folder, which has links to the files that it names.

    Args:
        folder: of the new record, on the same file system. What is there is removed first.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    named = (name for side in data.sides.values() for name in (*side.shards, side.index))
    for name in filter(None, [*named, data.test_records]):
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        os.link(data.path(name), target)
    if data.path(COLUMNS).is_file():
        os.link(data.path(COLUMNS), folder / COLUMNS)
    if data.tokenizer:
        source, target = data.path(data.tokenizer), folder / data.tokenizer
        shutil.copytree(source, target, copy_function=os.link)
    return data.model_copy(update={"folder": str(folder)})


def data_path(study: Path, config: RunConfig) -> Path:
    """Return the file of the record that trials with these data share."""
    # The model decides about the tokenizer and the length of rows. Models with other layers prepare
    # again, and the preprocess step finds the data that it prepared before.
    fields = {
        "data": config.counted(Use.GATE)["data"],
        "model": config.counted(Use.TRAINING)["model"],
        **config.counted(Use.RUN).get("cross_validation", {}),
    }
    if column := config.training.curriculum.column:
        fields["difficulty"] = column
    if config.training.augmentation.on:
        fields["texts"] = True
    return shared_data(study) / f"{value_digest(fields)}.json"


class Curve:
    """A trial as its events describe it. Add them in the order in which they happened."""

    def __init__(self) -> None:
        self._attempt = self._resumed = self._reported = self._saved = 0
        self._validations = dict[int, Validation]()
        self._condition: Condition = "new"
        self._failed: AttemptEnded | None = None
        self._failure = self._error = ""
        self._fallbacks = list[str]()
        self._latency_ms: float | None = None
        self._seconds, self._began, self._latest = 0.0, 0.0, 0.0
        # By the monotonic clock: as `_began`, and when it first had its data and a process.
        self._since = 0.0
        self._prepared: float | None = None

    def state(self, *, running: bool) -> TrialState:
        """Return the trial's state.

        Args:
            running: whether processes train it now.
        """
        condition: Condition = "running" if running else self._condition
        failed, now = condition == "failed", time.monotonic()
        spent = now - self._since if running else self._latest - self._began
        return TrialState(
            condition=condition,
            step=self._reported if running else self._saved,
            validations=tuple(self._validations[step] for step in sorted(self._validations)),
            seconds=self._seconds + (max(0.0, spent) if self._began else 0.0),
            failure=self._failure if failed else "",
            error=self._error if failed else "",
            fallbacks=tuple(self._fallbacks),
            latency_ms=self._latency_ms,
            since_prepared=None if self._prepared is None or not running else now - self._prepared,
        )

    @singledispatchmethod
    def add(self, event: Event) -> None:
        """Add an event. Those of other kinds change nothing."""

    @add.register
    def _(self, event: SupervisorStarted) -> None:
        if self._prepared is None:
            self._prepared = _monotonic(event)
        # Whoever starts a failed trial again wants another try.
        if self._condition != "new":
            self._condition = "paused"

    @add.register
    def _(self, event: AttemptStarted) -> None:
        self._attempt, self._resumed = event.attempt, event.resumed_from_step or 0
        self._reported = self._saved = self._resumed
        self._began = self._latest = event.time
        self._since = _monotonic(event)
        self._condition = "paused"
        # After a fallback to an earlier checkpoint, training may take another course.
        self._validations = {
            step: item for step, item in self._validations.items() if step <= self._resumed
        }

    @add.register
    def _(self, event: LatencyMeasured) -> None:
        self._latency_ms = event.milliseconds

    @add.register
    def _(self, event: TrainingStep) -> None:
        self._report(event.attempt, event.step, event.time)

    @add.register
    def _(self, event: CheckpointSaved) -> None:
        self._report(event.attempt, event.step, event.time)
        if event.attempt == self._attempt:
            self._saved = event.step

    @add.register
    def _(self, event: Validated) -> None:
        self._report(event.attempt, event.step, event.time)
        if event.attempt == self._attempt:
            self._validations[event.step] = Validation(event.step, dict(event.metrics))

    @add.register
    def _(self, event: AttemptEnded) -> None:
        if self._began:
            self._seconds += max(0.0, event.seconds or event.time - self._began)
        self._began = 0.0
        self._failed = event if event.outcome == "failed" else None
        self._condition = "finished" if event.outcome in SUCCESSES else "paused"

    @add.register
    def _(self, event: DecisionMade) -> None:
        if event.fallback and event.fallback not in self._fallbacks:
            self._fallbacks.append(event.fallback)
        if event.action == "stop" and self._failed is not None:
            self._condition = "failed"
            self._failure, self._error = self._failed.failure_class, self._failed.message

    @add.register
    def _(self, event: StepFailed) -> None:
        """The trial ended before an attempt, or without one."""
        self._condition, self._error = "failed", event.message
        reported = RankError(kind=event.error, message=event.message)
        self._failure = str(classify([reported], {}, {}).failure_class)

    def _report(self, attempt: int, step: int, when: float) -> None:
        if attempt == self._attempt:
            self._reported, self._latest = max(self._reported, step), max(self._latest, when)


def _monotonic(event: Event) -> float:
    """Return when an event happened by the monotonic clock, which nobody sets."""
    return time.monotonic() - max(0.0, time.time() - event.time)


def read_curve(events: Path) -> Curve:
    """Return what the events in a folder say about a trial."""
    curve = Curve()
    for event in read_events(events):
        curve.add(event)
    return curve
