"""Find what ended runs no longer need: checkpoints, unpromoted model versions, prepared data."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from steadytrain.components.report.facts import Facts, gather
from steadytrain.components.report.story import outcome
from steadytrain.components.shared.errors import BadInput, RunBusy, StorageError
from steadytrain.components.shared.events.types import Validated
from steadytrain.components.shared.lease import Lease, held, hold
from steadytrain.components.shared.storage import LocalStorage, Storage, open_storage
from steadytrain.components.shared.workspace import Workspace
from steadytrain.pipelines.gc_data import Garbage, unneeded_by_studies, unneeded_data
from steadytrain.pipelines.lock import holder, run_lock
from steadytrain.pipelines.runs import find_run, run_folders

if TYPE_CHECKING:
    from steadytrain.components.train.checkpoint import Checkpoint, Lineage

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
        at_work = holder(workspace) is not None or held(LocalStorage(workspace.lease))
    except (StorageError, BadInput) as error:
        facts.unreadable.append(error.message)
    if facts.unreadable:
        _log.warning("%s is damaged and was not changed: %s", workspace.run_id, facts.unreadable[0])
        return False
    return not at_work and _idle(workspace, idle_seconds)


def _untrained(workspace: Workspace) -> AbstractContextManager[Lease]:
    """Hold the run's lease, so that nothing trains it meanwhile."""
    config, _ = find_run(workspace.output, workspace.run_id)
    seconds = config.recovery.lease_seconds
    return hold(LocalStorage(workspace.lease), run_id=workspace.run_id, seconds=seconds)


def _unattended(workspace: Workspace, idle_seconds: float, take: Callable[[], bool]) -> bool:
    """Call `take` while nothing else can use the run. Return False if it is in use or not idle."""
    try:
        with run_lock(workspace), _untrained(workspace):
            return _idle(workspace, idle_seconds) and take()
    except RunBusy:
        return False


def _idle(workspace: Workspace, seconds: float) -> bool:
    """Check the age of the run's events, which are also written by a run on another machine."""
    signs = [path.lstat().st_mtime for path in workspace.events.glob("*.jsonl")]
    return max(signs, default=0.0) <= time.time() - seconds


def _checkpoints(facts: Facts, idle_seconds: float) -> Iterator[Garbage]:
    from steadytrain.components.train.checkpoint import checkpoints_of

    config, workspace = find_run(facts.workspace.output, facts.workspace.run_id)
    storage = open_storage(checkpoints_of(config))
    # A run of the same name from another output may be saving to an external folder. Only its
    # writes are visible from here.
    own = config.recovery.checkpoints is None
    idle = partial(_unwritten, storage, 0.0 if own else idle_seconds)
    if not idle():
        return
    for folder in _superfluous(storage, facts):
        what = f"checkpoint {folder} of {workspace.run_id}"
        take = partial(_clear, storage, folder, idle)
        remove = partial(_unattended, workspace, idle_seconds, take)
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


def _clear(storage: Storage, folder: str, idle: Callable[[], bool]) -> bool:
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
        remove = partial(_unattended, workspace, idle_seconds, passed.remove)
        yield Garbage(what, passed.bytes, remove)
