"""Folders that are downloaded once for all runs of an output. Each is complete or absent."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from steadytrain.components.shared.digest import value_digest
from steadytrain.components.shared.lock import lock
from steadytrain.components.shared.storage.local import local_errors, sync_folder

WAIT_SECONDS = 6 * 3600.0
"""How long to wait for another process that downloads the same folder. The lock of a dead process
is freed."""


def fetched(downloads: Path, version: Any, fetch: Callable[[Path], None]) -> Path:
    """Return the folder for a version of something. Download it unless an earlier call has done so.

    Args:
        downloads: the folder that holds all downloads.
        version: plain data that changes whenever the content does.
        fetch: fills an empty temporary folder. Only one process at a time calls it. The folder gets
            its final name after `fetch` has returned.

    Raises:
        RunBusy: if another process has been downloading it for WAIT_SECONDS.
        StorageError: if the folder cannot be written.
    """
    name = value_digest(version)[:32]
    target = downloads / name
    if target.is_dir():
        return target
    with local_errors("write", target):
        downloads.mkdir(parents=True, exist_ok=True)
    with lock(str(downloads), f".{name}", wait_seconds=WAIT_SECONDS):
        if target.is_dir():
            return target
        partial = downloads / f".partial-{name}"
        with local_errors("write", target):
            # A killed process may have left a partial download.
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
