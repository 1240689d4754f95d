"""Where everything of a run is stored. No other module builds these paths.

<output>/
  data/<fingerprint>/     packed data, tokenizer, data card, quarantine; never changed
  data/<fingerprint>.teacher-<key>/  what a teacher answers to the training rows
  reuse/<step>/<key>      outputs that may be reused
  losses/<key>.arrow      each row's loss under a curriculum's reference model
  learned/<key>.json      settings that fit in a device's memory
  checks/<job>.json       what a pipeline run's check for new data found, until its report
  mlflow.db, mlartifacts/ the default tracking store (shared/tracking/store.py)
  runs/<run>/
    config.yaml           the full configuration
    records/<step>.json   the result of each step
    events/*.jsonl        the event stream, one file per writer
    events/ledger-*.jsonl the events that are state, one file per supervisor (recovery/ledger.py)
    attempts/<n>/         files shared by supervisor and ranks (train/attempt.py)
    checkpoints/ logs/  model/  evaluation/  compiled/
    lease/                which supervisor owns the training run (shared/lease.py)
    tracking/             the MLflow runs of this run
    transformers/         the same with Transformers' Trainer (train/transformers_script.py)
    adjust.json           a change that waits for the supervisor (recovery/adjust.py)
    report.html
    told                  what was last sent to the webhook
    alerts.json           alerts that the webhook has reported as firing
"""

from __future__ import annotations

import contextlib
import errno
import os
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pydantic import ValidationError

from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.config.document import shown
from steadytrain.components.shared.errors import BadInput, Unreadable
from steadytrain.components.shared.events import Event, EventStream, JsonLines
from steadytrain.components.shared.paths import Inside
from steadytrain.components.shared.records import Record
from steadytrain.components.shared.storage import LocalStorage

_ANSWERS: Final = ".teacher-"
_LEAST_BYTES: Final = 1 << 20
"""With less free disk space, a run cannot even report what it lacks."""


def answers_folder(data: Path, key: str) -> Path:
    """Return the folder for a teacher's answers to prepared data.

    Args:
        data: the folder of the data. key: digest of what determines the answers.
    """
    return data.with_name(f"{data.name}{_ANSWERS}{key[:16]}")


def data_answered(name: str) -> str:
    """Return the name of the data's folder from that of a teacher's answers to it.

    The name of any other folder stays the same.
    """
    return name.partition(_ANSWERS)[0]


@dataclass(frozen=True)
class Workspace:
    """The folders of one run in an output folder."""

    output: Path
    run_id: str

    @classmethod
    def of(cls, config: RunConfig) -> Workspace:
        """Return the workspace of a configuration without creating anything.

        Raises:
            BadInput: if the output cannot be a folder on this machine.
        """
        try:
            # A relative path is invalid if the current folder was deleted.
            workspace = cls(Path(config.output).absolute(), config.run_id)
            places = [workspace.folder, *workspace.folder.parents]
            nearest = next(folder for folder in places if folder.exists())
            if not nearest.is_dir():
                raise NotADirectoryError(errno.ENOTDIR, f"{nearest} is not a folder")
        except OSError as error:
            raise BadInput(
                f"output = {shown(config.output)} cannot be used: {error.strerror}",
                remedy="give a folder that you can access, with a shorter name if this one is "
                "too long",
            ) from error
        return workspace

    def lacks_space(self) -> bool:
        """Return whether the disk of the output is known to be full, or to lack inodes."""
        try:
            free = os.statvfs(self.nearest())
        except OSError:
            return False
        # Not every file system counts inodes.
        inodes = free.f_favail > 0 or free.f_files == 0
        return free.f_bavail * free.f_frsize < _LEAST_BYTES or not inodes

    def nearest(self) -> Path:
        """Return the output folder, or the first folder above it that exists."""
        return next(folder for folder in (self.output, *self.output.parents) if folder.exists())

    @property
    def folder(self) -> Path:
        return self.output / "runs" / self.run_id

    @property
    def arguments(self) -> str:
        """What names the run to a command in any folder."""
        return f"{self.run_id} --output {shlex.quote(str(self.output))}"

    checks = Inside("output", "checks")
    config = Inside("folder", "config.yaml")
    events = Inside("folder", "events")
    lease = Inside("folder", "lease")
    attempts = Inside("folder", "attempts")
    checkpoints = Inside("folder", "checkpoints")
    compiled = Inside("folder", "compiled")
    """Code compiled by torch.compile."""
    logs = Inside("folder", "logs")
    offloaded = Inside("folder", "offloaded")
    """What ranks keep on disk while they train (`compute.offload`)."""
    model = Inside("folder", "model")
    evaluation = Inside("folder", "evaluation")
    quarantine = Inside("folder", "quarantine.jsonl")
    """Rejected records, if preparing the data failed."""
    transformers = Inside("folder", "transformers")
    adjust = Inside("folder", "adjust.json")
    report = Inside("folder", "report.html")
    notified = Inside("folder", "told")
    alerted = Inside("folder", "alerts.json")
    """The alerts that the webhook has reported as firing."""
    resubmitted = Inside("folder", "resubmitted")
    """Holds a note for each resubmission of the pipeline."""
    downloads = Inside("output", "downloads")
    locks = Inside("output", "locks")
    tracking = Inside("folder", "tracking")
    tracking_store = Inside("output", "mlflow.db")
    tracking_artifacts = Inside("output", "mlartifacts")
    records = Inside("folder", "records")

    def record(self, step: str) -> Path:
        return self.records / f"{step}.json"

    prepared = Inside("output", "data")
    """Folders of prepared data, shared by all runs."""
    losses = Inside("output", "losses")
    """Files with each training row's loss under a reference model, shared by all runs."""

    def learned(self, fingerprint: str) -> Path:
        return self.output / "learned" / f"{fingerprint}.json"

    def create(self) -> None:
        """Create the run's folder.

        Raises:
            BadInput: if it cannot be written, or something else is in the place of a folder in it.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            probe = self.folder / f".write-{os.getpid()}"
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise BadInput(
                f"output = {str(self.output)!r} cannot be written: {error.strerror}",
                remedy="grant write permission there, free space, or set another output",
            ) from error
        for folder in (self.logs, self.records, self.lease, self.attempts):
            if os.path.lexists(folder) and not folder.is_dir():
                raise BadInput(
                    f"{folder} is in the place of a folder of run {self.run_id!r}",
                    remedy="move it away, then start the run again: it continues where it stopped",
                )

    def stream(self, writer: str) -> EventStream:
        """Return the run's event stream for one writer (a step, the supervisor, a rank)."""
        return EventStream(self.lines(writer))

    def add_events(self, writer: str, *events: Event) -> None:
        """Add events to the stream of a writer that has nothing more to report for now."""
        with contextlib.closing(self.stream(writer)) as stream:
            for event in events:
                stream.emit(event)

    def lines(self, writer: str) -> JsonLines:
        """Return the file of that stream, for a writer that also stores its events elsewhere."""
        return JsonLines(self.events / f"{writer}.jsonl", job_id=self.run_id)


class DataCheck(Record):
    """The result of a check.

    found: whether there is something new to train on. reason: why, in a sentence.
    failure: error, message and remedy, if the check failed.
    """

    found: bool = False
    reason: str = ""
    failure: dict[str, str] | None = None


def keep_data_check(workspace: Workspace, job: str, check: DataCheck) -> None:
    """Store the result of a pipeline run's check.

    The check comes before the run, which may never start, so it is not kept in the run's folder.

    Args:
        job: KFP's id of the run.
    """
    LocalStorage(workspace.checks).write(f"{job}.json", check.model_dump_json().encode())


def take_data_check(workspace: Workspace, job: str) -> DataCheck | None:
    """Return the result of a pipeline run's check, and forget it; None if there is none."""
    storage, name = LocalStorage(workspace.checks), f"{job}.json"
    try:
        check = DataCheck.model_validate_json(storage.read(name))
    except (FileNotFoundError, Unreadable, ValidationError):
        return None
    storage.delete(name)
    return check
