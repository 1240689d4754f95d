"""Find what ended runs no longer need: checkpoints, model versions, prepared data, studies."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from steadytrain.components.preprocess.prepared import PARTIAL, leftovers, remove
from steadytrain.components.report.facts import Facts, gather
from steadytrain.components.report.story import outcome
from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.errors import BadInput, RunBusy, StorageError
from steadytrain.components.shared.events.types import Validated
from steadytrain.components.shared.lease import Lease, hold, is_held
from steadytrain.components.shared.records import DataRecord
from steadytrain.components.shared.storage import LocalStorage, Storage, open_storage
from steadytrain.components.shared.workspace import Workspace, data_answered
from steadytrain.components.tune.history import History
from steadytrain.components.tune.log import open_log
from steadytrain.components.tune.study import study_of
from steadytrain.components.tune.trials.folder import TrialFolder, read_curve
from steadytrain.pipelines.runs import find_run, holder, run_folders, run_lock

if TYPE_CHECKING:
    from steadytrain.components.train.checkpoint import Checkpoint, Lineage


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
        elif (
            not name.startswith(PARTIAL)
            and _data_is_idle(folder, idle_seconds)
            and not needed(name)
        ):
            yield Garbage(what, bytes_, partial(_remove, folder, needed))
    for folder in list(leftovers(root, idle_seconds=idle_seconds)):
        what, bytes_ = f"unfinished data {folder.name}", storage.weigh(folder.name).bytes
        yield Garbage(what, bytes_, partial(_remove_leftover, folder, idle_seconds))


def _data_is_idle(folder: Path, seconds: float) -> bool:
    """Check the time when a run last started to use the data."""
    with contextlib.suppress(FileNotFoundError):
        return folder.stat().st_mtime <= time.time() - seconds
    return False


def _needed(output: Path, name: str, *, ended: Ask, finished: Ask) -> bool:
    for index in run_folders(output):
        workspace = Workspace(output, index.name)
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


_ENDED: Final = ("finished", "failed", "discarded", "skipped")
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
            if _is_idle(folder, idle_seconds) and (study := _read(folder)):
                yield from _of_study(folder, *study, idle_seconds)
        except (BadInput, StorageError, OSError) as error:
            _log.warning("study %s is damaged and was not changed: %s", folder.name, error)


def _of_study(
    folder: Path, config: RunConfig, history: History, idle_seconds: float
) -> Iterator[Garbage]:
    storage, seconds = LocalStorage(folder), config.recovery.lease_seconds
    for trial in history.trials:
        index = TrialFolder(folder, trial.number)
        if trial.status in _ENDED and _is_real_folder(index.path) and index.config.is_file():
            what = f"trial {trial.number} of study {folder.name}"
            size = LocalStorage(index.path).weigh().bytes
            take = partial(_discard, index)
            yield Garbage(
                what, size, partial(_if_study_is_unused, folder, seconds, idle_seconds, take)
            )
    there = [name for name in _DATA if _is_real_folder(folder / name)]
    if there and all(trial.status in _ENDED for trial in history.trials):
        what, size = f"data of study {folder.name}", sum(storage.weigh(n).bytes for n in there)
        take = partial(_clear_folders, storage, there)
        yield Garbage(what, size, partial(_if_study_is_unused, folder, seconds, idle_seconds, take))


def _is_real_folder(folder: Path) -> bool:
    """Return whether a folder is there, and not a link to one that others may use."""
    return folder.is_dir() and not folder.is_symlink()


def _is_idle(folder: Path, idle_seconds: float) -> bool:
    """Return whether no driver holds a study, and none has written to its log for a while."""
    written = (folder / "log.jsonl").stat().st_mtime
    return written <= time.time() - idle_seconds and not is_held(LocalStorage(folder / "lease"))


def _read(folder: Path) -> tuple[RunConfig, History] | None:
    """Return a study's configuration and history; None if nothing was written yet."""
    records = open_log(str(folder.parent), folder.name).read()
    if not records:
        return None
    return study_of(records)


def _if_study_is_unused(
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


def _discard(trial_folder: TrialFolder) -> None:
    trial_folder.discard(read_curve(trial_folder.workspace.events).state(running=False))


def _clear_folders(storage: LocalStorage, folders: list[str]) -> None:
    for name in folders:
        storage.clear(name)


_log = logging.getLogger(__name__)


def garbage(output: Path, *, idle_seconds: float) -> Iterator[Garbage]:
    """Yield everything that can be removed.

    Checkpoints, data and what studies left come first, then model versions, since those need the
    registry.

    Args:
        idle_seconds: leave runs alone that were active within this time.

    Raises:
        TrackingError: the registry cannot be used.
    """
    ended = [facts for facts in _runs(output) if _ended(facts, idle_seconds)]
    for facts in ended:
        try:
            yield from _checkpoints(facts, idle_seconds)
        except (StorageError, BadInput) as error:
            _log.warning("checkpoints of %s are kept: %s", facts.workspace.run_id, error)
        except FileNotFoundError:
            continue  # another process is removing it, too
    yield from unneeded_data(
        output.absolute(),
        idle_seconds=idle_seconds,
        ended=lambda workspace: _ended(gather(workspace), idle_seconds),
        finished=lambda workspace: _has_its_model(gather(workspace)),
    )
    yield from unneeded_by_studies(output.absolute(), idle_seconds=idle_seconds)
    for facts in ended:
        yield from _version(facts, idle_seconds)


def _runs(output: Path) -> Iterator[Facts]:
    for folder in run_folders(output.absolute()):
        workspace = Workspace(output.absolute(), folder.name)
        if os.path.lexists(workspace.config):
            yield gather(workspace)


def _ended(facts: Facts, idle_seconds: float) -> bool:
    """Return whether a run has ended. False for a damaged run: its state and needs are unknown."""
    workspace = facts.workspace
    try:
        if os.path.lexists(workspace.config):
            find_run(workspace.output, workspace.run_id)
        at_work = holder(workspace) is not None or is_held(LocalStorage(workspace.lease))
    except (StorageError, BadInput) as error:
        facts.unreadable.append(error.message)
    if facts.unreadable:
        _log.warning("%s is damaged and was not changed: %s", workspace.run_id, facts.unreadable[0])
        return False
    return not at_work and _run_is_idle(workspace, idle_seconds)


def _untrained(workspace: Workspace) -> AbstractContextManager[Lease]:
    """Hold the run's lease, so that nothing trains it meanwhile."""
    config, _ = find_run(workspace.output, workspace.run_id)
    seconds = config.recovery.lease_seconds
    return hold(LocalStorage(workspace.lease), run_id=workspace.run_id, seconds=seconds)


def _if_run_is_unused(workspace: Workspace, idle_seconds: float, take: Callable[[], bool]) -> bool:
    """Call `take` while nothing else can use the run. Return False if it is in use or not idle."""
    try:
        with run_lock(workspace), _untrained(workspace):
            return _run_is_idle(workspace, idle_seconds) and take()
    except RunBusy:
        return False


def _run_is_idle(workspace: Workspace, seconds: float) -> bool:
    """Check the age of the run's events, which are also written by a run on another machine."""
    signs = [path.lstat().st_mtime for path in workspace.events.glob("*.jsonl")]
    return max(signs, default=0.0) <= time.time() - seconds


def _checkpoints(facts: Facts, idle_seconds: float) -> Iterator[Garbage]:
    from steadytrain.components.train.checkpoint import checkpoints_of

    config, workspace = find_run(facts.workspace.output, facts.workspace.run_id)
    storage = open_storage(checkpoints_of(config))
    # A run of the same name from another output may be saving to an external folder. Only its
    # writes are visible from here.
    in_output = config.recovery.checkpoints is None
    idle = partial(_unwritten, storage, 0.0 if in_output else idle_seconds)
    if not idle():
        return
    for folder in _superfluous(storage, facts):
        what = f"checkpoint {folder} of {workspace.run_id}"
        take = partial(_clear_checkpoint, storage, folder, idle)
        remove = partial(_if_run_is_unused, workspace, idle_seconds, take)
        yield Garbage(what, storage.weigh(folder).bytes, remove)


def _superfluous(storage: Storage, facts: Facts) -> list[str]:
    """Return the checkpoint folders that nothing will read again, including damaged ones."""
    from steadytrain.components.train.checkpoint import Lineage
    from steadytrain.components.train.checkpoint.checkpoint import is_of_a_step
    from steadytrain.components.train.checkpoint.store import committed

    folders = [name for name in storage.folders() if is_of_a_step(name)]
    if _has_its_model(facts):
        return folders
    whole = committed(storage.uri)
    lineage = Lineage.of(facts.history.supervisor)
    verified = next((item for item in reversed(whole) if _is_whole(item, lineage)), None)
    if verified is None:
        return []
    needed = {item.name for item in whole if item.step >= verified.step} | {_best(facts)}
    return [name for name in folders if name not in needed]


def _has_its_model(facts: Facts) -> bool:
    """Return whether the run finished and its exported model exists."""
    done = facts.training is not None and Path(facts.training.model).is_dir()
    return done and outcome(facts).state == "finished"


def _is_whole(checkpoint: Checkpoint, lineage: Lineage) -> bool:
    from steadytrain.components.train.checkpoint import CheckpointDamaged

    try:
        lineage.check(checkpoint)
        checkpoint.verify()
    except CheckpointDamaged:
        return False
    return True


def _best(facts: Facts) -> str:
    """Return the name of the checkpoint with the best validation, which would be exported."""
    from steadytrain.components.train.checkpoint.checkpoint import PREFIX

    steps = [event.step for event in facts.of(Validated) if event.best]
    return f"{PREFIX}{steps[-1]:08d}" if steps else ""


def _unwritten(storage: Storage, seconds: float) -> bool:
    return storage.weigh().newest <= time.time() - seconds


def _clear_checkpoint(storage: Storage, folder: str, idle: Callable[[], bool]) -> bool:
    from steadytrain.components.train.checkpoint.manifest import COMMIT

    if not idle():
        return False
    # Without the commit marker, a half-removed checkpoint no longer counts.
    storage.delete(f"{folder}/{COMMIT}")
    storage.clear(folder)
    return True


def _version(facts: Facts, idle_seconds: float) -> Iterator[Garbage]:
    if outcome(facts).state != "finished" or facts.registration is None:
        return
    from steadytrain.components.register.stale import StaleVersion

    config, workspace = find_run(facts.workspace.output, facts.workspace.run_id)
    passed = StaleVersion(config, workspace)
    if passed.is_there:
        record = passed.record
        what = f"version {record.version} of {record.model_name}, of {workspace.run_id}"
        remove = partial(_if_run_is_unused, workspace, idle_seconds, passed.remove)
        yield Garbage(what, passed.bytes, remove)
