"""Where everything of a run lies. No other module builds these paths.

<output>/
  data/<fingerprint>/     packed data, tokenizer, data card, quarantine; never changed
  reuse/<step>/<key>      which outputs may be used again
  learned/<key>.json      what fits into the memory of a device
  mlflow.db, mlartifacts/ the default tracking store (shared/tracking/store.py)
  runs/<run>/
    config.yaml           the whole configuration
    records/<step>.json   what each step gave
    events/*.jsonl        the stream of events, a file for each writer
    attempts/<n>/         where supervisor and ranks meet (train/attempt.py)
    ledger/  checkpoints/ logs/  model/  evaluation/
    lease/                which supervisor owns the training (train/lease.py)
    tracking/             which MLflow runs are this run's
    report.html
    told                  what the webhook was last told of
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.config.plain import shown
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.shared.events import EventStream, JsonLines


@dataclass(frozen=True)
class Workspace:
    """The folders of one run below an output folder."""

    output: Path
    run_id: str

    @classmethod
    def of(cls, config: RunConfig) -> Workspace:
        """The workspace of a configuration; nothing is created.

        Raises:
            BadInput: the output cannot be a folder here.
        """
        if "://" in config.output:
            raise BadInput(
                f"output = {config.output!r}: this version writes its output to a folder",
                remedy="give a folder, on a cluster that of a mounted volume",
            )
        try:
            # A relative one has no place where the current folder has been removed.
            workspace = cls(Path(config.output).absolute(), config.run_id)
            workspace.folder.exists()
        except OSError as error:
            raise BadInput(
                f"output = {shown(config.output)}: {error.strerror}",
                remedy="give a folder that can be reached, with a shorter name or with permission",
            ) from error
        return workspace

    @property
    def folder(self) -> Path:
        return self.output / "runs" / self.run_id

    @property
    def config(self) -> Path:
        return self.folder / "config.yaml"

    @property
    def events(self) -> Path:
        return self.folder / "events"

    @property
    def ledger(self) -> Path:
        return self.folder / "ledger"

    @property
    def lease(self) -> Path:
        return self.folder / "lease"

    @property
    def attempts(self) -> Path:
        return self.folder / "attempts"

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    @property
    def logs(self) -> Path:
        return self.folder / "logs"

    @property
    def model(self) -> Path:
        return self.folder / "model"

    @property
    def evaluation(self) -> Path:
        return self.folder / "evaluation"

    @property
    def quarantine(self) -> Path:
        """Records that were not used, where preparing the data failed."""
        return self.folder / "quarantine.jsonl"

    @property
    def report(self) -> Path:
        return self.folder / "report.html"

    @property
    def told(self) -> Path:
        return self.folder / "told"

    @property
    def resubmitted(self) -> Path:
        """A note for each time that the pipeline was submitted again."""
        return self.folder / "resubmitted"

    @property
    def downloads(self) -> Path:
        return self.output / "downloads"

    @property
    def locks(self) -> Path:
        return self.output / "locks"

    @property
    def tracking(self) -> Path:
        return self.folder / "tracking"

    @property
    def tracking_store(self) -> Path:
        return self.output / "mlflow.db"

    @property
    def tracking_artifacts(self) -> Path:
        return self.output / "mlartifacts"

    def record(self, step: str) -> Path:
        return self.folder / "records" / f"{step}.json"

    @property
    def prepared(self) -> Path:
        """Folders of prepared data, which runs share."""
        return self.output / "data"

    def learned(self, fingerprint: str) -> Path:
        return self.output / "learned" / f"{fingerprint}.json"

    def create(self) -> None:
        """Makes the run's folder.

        Raises:
            BadInput: it cannot be written.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            probe = self.folder / f".write-{os.getpid()}"
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise BadInput(
                f"output = {str(self.output)!r} cannot be written: {error.strerror}",
                remedy="give write permission there, free space, or set another output",
            ) from error

    def stream(self, writer: str) -> EventStream:
        """The run's event stream for one writer (a step, the supervisor, a rank)."""
        return EventStream(JsonLines(self.events / f"{writer}.jsonl", job_id=self.run_id))
