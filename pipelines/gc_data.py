"""Prepared data that no run needs anymore, and unfinished data of killed processes.

What a teacher answered to prepared data is needed as long as that data.

A run needs the data that its record names until it is finished, since it may be resumed until then.
A run can start to use data at any time without asking. So `gc` first sets a folder aside, then
reads the records again, and only then removes the folder. A run works the other way around: it
saves its record first, and then looks for the folder (components/preprocess/step.py). That way, one
of the two always sees the other.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Final

from steadytrain.components.preprocess.prepared import PARTIAL, leftovers, remove
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.shared.records import DataRecord
from steadytrain.components.shared.storage import LocalStorage
from steadytrain.components.shared.workspace import Workspace, data_answered
from steadytrain.pipelines.garbage import Garbage
from steadytrain.pipelines.runs import run_folders

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
