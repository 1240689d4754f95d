"""Let only one command at a time use a run on this machine.

The lock is a file that the kernel keeps locked (flock). A process that inherits the descriptor
holds the lock too: the lock is free once all of them have ended, however they ended. What the file
says about its holder is for messages and for `stop`.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from pydantic import ValidationError

from steadytrain.components.shared.errors import RunBusy
from steadytrain.components.shared.identity import Identity
from steadytrain.components.shared.lock import try_lock
from steadytrain.components.shared.storage.local import local_errors
from steadytrain.components.shared.workspace import Workspace

_NAME_SECONDS = 1.0
"""How long to wait for a holder's name, which it writes right after it locks the file."""
_LOOK_SECONDS = 0.01
_UNKNOWN = Identity(pid=0, host="an unknown host", machine="", born=0.0, since="an unknown time")


@contextlib.contextmanager
def run_lock(workspace: Workspace, *, linger_seconds: float = 0.0) -> Iterator[int]:
    """Hold a run for this process.

    Args:
        linger_seconds: how long to wait for a holder in another container or on another host to
            end.

    Yields:
        The locked descriptor, for child processes that must hold the lock as well.

    Raises:
        RunBusy: another process holds the lock. The message says which, where, and since when.
        StorageError: the lock file cannot be written.
    """
    path = _path(workspace)
    with local_errors("write", path):
        path.parent.mkdir(parents=True, exist_ok=True)
        # Unbuffered: after a failed write, a buffer would write again when the file is closed.
        handle = path.open("ab+", buffering=0)
    with handle:
        deadline = time.monotonic() + linger_seconds
        while not try_lock(handle):
            # Without a holder, another process was only checking who holds the lock.
            found = holder(workspace)
            if found is not None and (not _elsewhere(found) or time.monotonic() > deadline):
                raise _busy(workspace, found)
            time.sleep(_LOOK_SECONDS)
        with local_errors("write", path):
            handle.truncate(0)
            handle.write(Identity.here().model_dump_json().encode())
        try:
            yield handle.fileno()
        finally:
            handle.truncate(0)


def holder(workspace: Workspace) -> Identity | None:
    """Return who holds a run, or None if nobody does. Only reads.

    Raises:
        StorageError: the lock file cannot be read.
    """
    path = _path(workspace)
    try:
        with local_errors("read", path):
            handle = path.open(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return None
    deadline = time.monotonic() + _NAME_SECONDS
    with handle:
        # A shared lock, so that two processes that only check do not block each other.
        while not try_lock(handle, shared=True):
            found = _read(handle)
            if found is not None:
                return found
            if time.monotonic() > deadline:
                return _UNKNOWN
            time.sleep(_LOOK_SECONDS)
    return None


def _path(workspace: Workspace) -> Path:
    return workspace.locks / f"{workspace.run_id}.run"


def _elsewhere(found: Identity) -> bool:
    return found is not _UNKNOWN and found.alive() is None


def _read(handle: IO[str]) -> Identity | None:
    handle.seek(0)
    try:
        return Identity.model_validate_json(handle.read())
    except ValidationError:
        return None


def _busy(workspace: Workspace, found: Identity | None) -> RunBusy:
    return RunBusy(
        f"run {workspace.run_id!r} in {workspace.output} is in use by {found or _UNKNOWN}",
        remedy=f"wait for it, stop it (steadytrain stop {workspace.run_id} "
        f"--output {workspace.output}), or give this run another name (run: ...)",
    )
