"""Folders that are fetched once for all runs of an output, each of them whole or absent."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from steadytrain.components.shared.digest import value_digest
from steadytrain.components.shared.lease import lease
from steadytrain.components.shared.storage.local import local_errors, sync_folder

WAIT_SECONDS = 6 * 3600.0
"""How long to wait for another process that fetches the same folder; a dead one frees the lock."""


def fetched(downloads: Path, version: Any, fetch: Callable[[Path], None]) -> Path:
    """The folder for a version of something, fetched unless an earlier call has done so.

    Args:
        version: plain data that changes whenever the content does.
        fetch: fills an empty folder. It is called aside, by one process at a time; the folder
            takes its final name only after `fetch` has returned.

    Raises:
        RunBusy: another process has been fetching it for WAIT_SECONDS.
        StorageError: the folder cannot be written.
    """
    name = value_digest(version)[:32]
    target = downloads / name
    if target.is_dir():
        return target
    with local_errors("write", target):
        downloads.mkdir(parents=True, exist_ok=True)
    with lease(str(downloads), f".{name}", wait_seconds=WAIT_SECONDS):
        if target.is_dir():
            return target
        partial = downloads / f".partial-{name}"
        with local_errors("write", target):
            # A process that was killed may have left a part of it.
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
        try:
            fetch(partial)
            with local_errors("write", target):
                partial.rename(target)
                sync_folder(downloads)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return target
