"""Prepared data that no run needs any more, and unfinished data of killed processes.

A run needs the data that its record names until it is finished: until then it may be
resumed. A run can begin to use data at any time without asking, so the folder is set
aside first, then the records are read once more, and only then the folder goes. A run
saves its record first and looks for the folder then (components/preprocess/step.py), so
one of the two always sees the other.
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
from steadytrain.components.shared.workspace import Workspace
from steadytrain.pipelines.litter import Litter
from steadytrain.pipelines.runs import run_folders

_ASIDE: Final = ".removed-"

Ask = Callable[[Workspace], bool]


def unneeded_data(
    output: Path, *, idle_seconds: float, ended: Ask, finished: Ask
) -> Iterator[Litter]:
    """Folders of <output>/data that can go.

    Args:
        idle_seconds: data that were made or taken up within this time stay.
        ended: whether nobody works on a run.
        finished: whether a run has its model, so that it needs its data no more.
    """
    root = Workspace(output, "").prepared
    needed = partial(_needed, output, ended=ended, finished=finished)
    storage = LocalStorage(root)
    for name in storage.folders():
        folder, what, bytes_ = root / name, f"prepared data {name}", storage.weigh(name).bytes
        if name.startswith(_ASIDE):
            # A `gc` was killed before it decided.
            if needed(name.removeprefix(_ASIDE)):
                _bring_back(folder)
            else:
                yield Litter(what, bytes_, partial(_decide, folder, needed))
        elif not name.startswith(PARTIAL) and _idle(folder, idle_seconds) and not needed(name):
            yield Litter(what, bytes_, partial(_remove, folder, needed))
    for folder in list(leftovers(root, idle_seconds=idle_seconds)):
        what, bytes_ = f"unfinished data {folder.name}", storage.weigh(folder.name).bytes
        yield Litter(what, bytes_, partial(_remove_leftover, folder, idle_seconds))


def _idle(folder: Path, seconds: float) -> bool:
    """By the time that a run last took the data up."""
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
            # By its name alone: a pod may see the output folder at another path.
            named = Path(DataRecord.load(path).folder).name
        except (BadInput, OSError):
            # A run at work may use any folder; one that is resumed prepares its data again.
            if not ended(workspace):
                return True
            continue
        if named == name and not (ended(workspace) and finished(workspace)):
            return True
    return False


def _remove(folder: Path, needed: Callable[[str], bool]) -> bool:
    aside = folder.with_name(f"{_ASIDE}{folder.name}")
    with contextlib.suppress(FileNotFoundError):
        return _decide(folder.rename(aside), needed)
    return False


def _decide(aside: Path, needed: Callable[[str], bool]) -> bool:
    """Removes what was set aside, or brings it back: then False."""
    if needed(aside.name.removeprefix(_ASIDE)):
        _bring_back(aside)
        return False
    # From here on nobody brings it back, so that no half of it ever is.
    gone = tempfile.mkdtemp(prefix=f"{PARTIAL}removed-", dir=aside.parent)
    shutil.rmtree(aside.rename(gone))
    return True


def _bring_back(aside: Path) -> None:
    # Another `gc` may be first, or a step may have prepared the same data in its place.
    with contextlib.suppress(OSError):
        aside.rename(aside.with_name(aside.name.removeprefix(_ASIDE)))


def _remove_leftover(folder: Path, idle_seconds: float) -> bool:
    if folder not in leftovers(folder.parent, idle_seconds=idle_seconds):
        return False
    remove(folder)
    return True
