"""Where the files of a study's trials are.

<study>/
  data/, reuse/       prepared data, shared by all trials (shared/workspace.py)
  trials/
    server.json       where the server of the trials listens (server.py)
    log               its output
    data/<key>.json   the DataRecord of each kind of data, without the test side (data.py)
    data/<key>/       links to its files
    <number>/         a trial: an output folder with one run
      config.yaml     its configuration
      log             the output of its process
      runs/trial/     the run (shared/workspace.py)
      record.json     instead of all this, once the trial is discarded
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter

from steadytrain.components.shared.config import RunConfig, load
from steadytrain.components.shared.storage import LocalStorage, open_storage
from steadytrain.components.shared.workspace import Workspace
from steadytrain.components.tune.trials.base import TrialState

RUN = "trial"
_STATE = TypeAdapter(TrialState)


@dataclass(frozen=True)
class TrialFolder:
    """The files of one trial."""

    study: Path
    number: int

    @property
    def path(self) -> Path:
        return trials_of(self.study) / f"{self.number:04d}"

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def log(self) -> Path:
        return self.path / "log"

    @property
    def record(self) -> Path:
        return self.path / "record.json"

    @property
    def workspace(self) -> Workspace:
        return Workspace(self.path, RUN)

    def configure(self, config: RunConfig, threads: int) -> None:
        """Store the trial's configuration, unless it has one.

        Args:
            threads: CPU threads per rank. A trial keeps those that it started with: with others,
                its sums would be computed in another order.
        """
        if self.config.is_file():
            return
        compute = config.compute.model_copy(
            update={"launcher": "process", "threads_per_rank": threads}
        )
        recovery = config.recovery
        if recovery.checkpoints is not None:
            place = f"{recovery.checkpoints.rstrip('/')}/{self.study.name}-{self.number:04d}"
            recovery = recovery.model_copy(update={"checkpoints": place})
        own = config.model_copy(
            update={
                "output": str(self.path),
                "run": RUN,
                "compute": compute,
                "recovery": recovery,
            }
        )
        LocalStorage(self.path).write(self.config.name, own.to_yaml().encode())

    def discard(self, state: TrialState) -> None:
        """Remove everything but the trial's state. Can be repeated if it was interrupted."""
        storage = LocalStorage(self.path)
        storage.write(self.record.name, _STATE.dump_json(state))
        if self.config.is_file():
            checkpoints = load(self.config).recovery.checkpoints
            if checkpoints is not None:
                open_storage(checkpoints).clear(RUN)
        for name in storage.folders():
            storage.clear(name)
        # The configuration last: it says where the checkpoints are.
        for path in (self.log, self.config):
            path.unlink(missing_ok=True)

    def discarded(self) -> TrialState | None:
        """Return the state of a discarded trial; None if it is not discarded."""
        try:
            return _STATE.validate_json(self.record.read_bytes())
        except FileNotFoundError:
            return None


def server_log(study: Path) -> Path:
    """Return the file with the output of the server."""
    return trials_of(study) / "log"


def trial_folders(study: Path) -> list[TrialFolder]:
    """Return the trials of a study that have a folder."""
    names = (path.name for path in trials_of(study).glob("*"))
    return [TrialFolder(study, int(name)) for name in sorted(names) if name.isdecimal()]


def trials_of(study: Path) -> Path:
    """Return the folder of a study's trials, as their processes are marked with it."""
    return Path(os.path.abspath(study)) / "trials"  # noqa: PTH100  links stay as they are
