"""What ended studies no longer need: leftovers of their trials, and their prepared data.

A paused trial keeps its checkpoint and its data, since a larger budget may continue it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Final

from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.errors import BadInput, RunBusy, StorageError
from steadytrain.components.shared.lease import held, hold
from steadytrain.components.shared.storage import LocalStorage
from steadytrain.components.tune.history import History
from steadytrain.components.tune.log import FileLog
from steadytrain.components.tune.study import study_of
from steadytrain.components.tune.trials.curve import read_curve
from steadytrain.components.tune.trials.place import TrialFolder
from steadytrain.pipelines.garbage import Garbage

_log = logging.getLogger(__name__)
_ENDED: Final = ("finished", "failed", "discarded")
_DATA: Final = ("data", "reuse", "trials/data")
"""Folders of prepared data. A study that continues prepares its data again."""


def unneeded_by_studies(output: Path, *, idle_seconds: float) -> Iterator[Garbage]:
    """Yield what the studies of an output folder no longer need.

    Studies whose log is elsewhere (`tune.log`) are left alone.

    Args:
        idle_seconds: leave studies alone that were active within this time.
    """
    for log in sorted((output / "studies").glob("*/log.jsonl")):
        folder = log.parent
        try:
            if _at_rest(folder, idle_seconds) and (found := _read(folder)):
                yield from _of_study(folder, *found, idle_seconds)
        except (BadInput, StorageError, OSError) as error:
            _log.warning("study %s is damaged and was not changed: %s", folder.name, error)


def _of_study(
    folder: Path, config: RunConfig, history: History, idle_seconds: float
) -> Iterator[Garbage]:
    storage, seconds = LocalStorage(folder), config.recovery.lease_seconds
    for trial in history.trials:
        place = TrialFolder(folder, trial.number)
        if trial.standing in _ENDED and _is_own(place.path) and place.config.is_file():
            what = f"trial {trial.number} of study {folder.name}"
            size = LocalStorage(place.path).weigh().bytes
            take = partial(_discard, place)
            yield Garbage(what, size, partial(_unattended, folder, seconds, idle_seconds, take))
    there = [name for name in _DATA if _is_own(folder / name)]
    if there and all(trial.standing in _ENDED for trial in history.trials):
        what, size = f"data of study {folder.name}", sum(storage.weigh(n).bytes for n in there)
        take = partial(_clear, storage, there)
        yield Garbage(what, size, partial(_unattended, folder, seconds, idle_seconds, take))


def _is_own(folder: Path) -> bool:
    """Return whether a folder is there, and not a link to one that others may use."""
    return folder.is_dir() and not folder.is_symlink()


def _at_rest(folder: Path, idle_seconds: float) -> bool:
    """Return whether no driver holds a study, and none has written to its log for a while."""
    written = (folder / "log.jsonl").stat().st_mtime
    return written <= time.time() - idle_seconds and not held(LocalStorage(folder / "lease"))


def _read(folder: Path) -> tuple[RunConfig, History] | None:
    """Return a study's configuration and history; None if nothing was written yet."""
    records = FileLog(folder / "log.jsonl").read()
    if not records:
        return None
    return study_of(records)


def _unattended(
    folder: Path, lease_seconds: float, idle_seconds: float, take: partial[None]
) -> bool:
    """Call `take` while no driver can use the study. Return False if one does or did recently."""
    lease = LocalStorage(folder / "lease")
    try:
        with hold(lease, run_id=folder.name, seconds=lease_seconds, what="study"):
            written = (folder / "log.jsonl").stat().st_mtime
            if written > time.time() - idle_seconds:
                return False
            take()
            return True
    except RunBusy:
        return False


def _discard(place: TrialFolder) -> None:
    place.discard(read_curve(place.workspace.events).state(running=False))


def _clear(storage: LocalStorage, folders: list[str]) -> None:
    for name in folders:
        storage.clear(name)
