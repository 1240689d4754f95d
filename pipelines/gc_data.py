"""What `steadytrain gc` can remove besides runs: prepared data, and leftovers of studies."""

from __future__ import annotations

import contextlib
import logging
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from steadytrain.components.preprocess.prepared import PARTIAL, leftovers, remove
from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.errors import BadInput, RunBusy, StorageError
from steadytrain.components.shared.lease import held, hold
from steadytrain.components.shared.records import DataRecord
from steadytrain.components.shared.storage import LocalStorage
from steadytrain.components.shared.workspace import Workspace, data_answered
from steadytrain.components.tune.history import History
from steadytrain.components.tune.log import open_log
from steadytrain.components.tune.study import study_of
from steadytrain.components.tune.trials.curve import read_curve
from steadytrain.components.tune.trials.folder import TrialFolder
from steadytrain.pipelines.runs import run_folders


@dataclass(frozen=True)
class Garbage:
    """Something to remove. `remove` removes it, or returns False if it is needed again."""

    what: str
    bytes: int
    remove: Callable[[], bool]


# Prepared data that no run needs anymore, and unfinished data of killed processes.
#
# What a teacher answered to prepared data is needed as long as that data.
#
# A run needs the data that its record names until it is finished, since it may be resumed until
# then. A run can start to use data at any time without asking. So `gc` first sets a folder aside,
# then reads the records again, and only then removes the folder. A run works the other way around:
# it saves its record first, and then looks for the folder (components/preprocess/step.py). That
# way, one of the two always sees the other.

_ASIDE: Final = ".removed-"

Ask = Callable[[Workspace], bool]


def unneeded_data(
    output: Path, *, idle_seconds: float, ended: Ask, finished: Ask
) -> Iterator[Garbage]:
    """Yield the folders in <output>/data that can be removed.

    Args:
        idle_seconds: keep data that a run created or used within this time.
        ended: returns whether a run is no longer active.
        finished: returns whether a run has its model, and so no longer needs its data.
    """
    root = Workspace(output, "").prepared
    needed = partial(_needed, output, ended=ended, finished=finished)
    storage = LocalStorage(root)
    for name in storage.folders():
        folder, what, bytes_ = root / name, f"prepared data {name}", storage.weigh(name).bytes
        if name.startswith(_ASIDE):
            # An earlier `gc` was killed before it decided.
            if needed(name.removeprefix(_ASIDE)):
                _bring_back(folder)
            else:
                yield Garbage(what, bytes_, partial(_decide, folder, needed))
        elif not name.startswith(PARTIAL) and _idle(folder, idle_seconds) and not needed(name):
            yield Garbage(what, bytes_, partial(_remove, folder, needed))
    for folder in list(leftovers(root, idle_seconds=idle_seconds)):
        what, bytes_ = f"unfinished data {folder.name}", storage.weigh(folder.name).bytes
        yield Garbage(what, bytes_, partial(_remove_leftover, folder, idle_seconds))


def _idle(folder: Path, seconds: float) -> bool:
    """Check the time when a run last started to use the data."""
    with contextlib.suppress(FileNotFoundError):
        return folder.stat().st_mtime <= time.time() - seconds
    return False


def _needed(output: Path, name: str, *, ended: Ask, finished: Ask) -> bool:
    for place in run_folders(output):
        workspace = Workspace(output, place.name)
        path = workspace.record("preprocess")
        if not path.is_file():
            continue
        try:
            # Compare only the name: a pod may see the output folder at another path.
            named = Path(DataRecord.load(path).folder).name
        except (BadInput, OSError):
            # An active run may use any folder; a run that is resumed prepares its data again.
            if not ended(workspace):
                return True
            continue
        if named == data_answered(name) and not (ended(workspace) and finished(workspace)):
            return True
    return False


def _remove(folder: Path, needed: Callable[[str], bool]) -> bool:
    aside = folder.with_name(f"{_ASIDE}{folder.name}")
    with contextlib.suppress(FileNotFoundError):
        return _decide(folder.rename(aside), needed)
    return False


def _decide(aside: Path, needed: Callable[[str], bool]) -> bool:
    """Remove a folder that was set aside. If it is needed, bring it back and return False."""
    if needed(aside.name.removeprefix(_ASIDE)):
        _bring_back(aside)
        return False
    # Nothing brings back a folder of this name, so a half-removed one never returns.
    gone = tempfile.mkdtemp(prefix=f"{PARTIAL}removed-", dir=aside.parent)
    shutil.rmtree(aside.rename(gone))
    return True


def _bring_back(aside: Path) -> None:
    # Another `gc` may have done it already, or a step may have prepared the same data again.
    with contextlib.suppress(OSError):
        aside.rename(aside.with_name(aside.name.removeprefix(_ASIDE)))


def _remove_leftover(folder: Path, idle_seconds: float) -> bool:
    if folder not in leftovers(folder.parent, idle_seconds=idle_seconds):
        return False
    remove(folder)
    return True


# What ended studies no longer need: leftovers of their trials, and their prepared data.
#
# A paused trial keeps its checkpoint and its data, since a larger budget may continue it.

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
        if trial.status in _ENDED and _is_own(place.path) and place.config.is_file():
            what = f"trial {trial.number} of study {folder.name}"
            size = LocalStorage(place.path).weigh().bytes
            take = partial(_discard, place)
            yield Garbage(what, size, partial(_unattended, folder, seconds, idle_seconds, take))
    there = [name for name in _DATA if _is_own(folder / name)]
    if there and all(trial.status in _ENDED for trial in history.trials):
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
    records = open_log(str(folder.parent), folder.name).read()
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
