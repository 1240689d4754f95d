"""One command at a time works on a run on this machine.

The lock is a file that the kernel holds locked (flock), so a crash lets go of
it; what the file says about its holder only serves the message.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import IO

from pydantic import ValidationError

from steadytrain.components.shared.errors import RunBusy
from steadytrain.components.shared.records import Record
from steadytrain.components.shared.workspace import Workspace


class _Holder(Record):
    pid: int
    host: str
    since: str


@contextlib.contextmanager
def run_lock(workspace: Workspace) -> Iterator[None]:
    """Holds a run for this process.

    Raises:
        RunBusy: another process holds it; the message says which, where, since when.
    """
    with _open(workspace) as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise _busy(workspace, _read(handle)) from error
        now = datetime.now(UTC).isoformat(timespec="seconds")
        _write(handle, _Holder(pid=os.getpid(), host=socket.gethostname(), since=now))
        try:
            yield
        finally:
            handle.truncate(0)


def holder(workspace: Workspace) -> int | None:
    """Process id of who holds a run, or None where nobody does."""
    if not _path(workspace).is_file():
        return None
    with _open(workspace) as handle:
        try:
            # A shared lock: two who only ask are not in each other's way.
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            found = _read(handle)
            return found.pid if found else None
    return None


def _path(workspace: Workspace) -> Path:
    return workspace.locks / f"{workspace.run_id}.run"


def _open(workspace: Workspace) -> IO[str]:
    workspace.locks.mkdir(parents=True, exist_ok=True)
    return _path(workspace).open("a+", encoding="utf-8")


def _read(handle: IO[str]) -> _Holder | None:
    handle.seek(0)
    try:
        return _Holder.model_validate_json(handle.read())
    except ValidationError:
        # The holder has the lock and has not written its name yet.
        return None


def _write(handle: IO[str], content: _Holder) -> None:
    handle.truncate(0)
    handle.write(content.model_dump_json())
    handle.flush()


def _busy(workspace: Workspace, found: _Holder | None) -> RunBusy:
    who = f"process {found.pid} on {found.host} since {found.since}" if found else "another process"
    return RunBusy(
        f"run {workspace.run_id!r} in {workspace.output} is worked on by {who}",
        remedy=f"wait for it, stop it (steadytrain stop {workspace.run_id} "
        f"--output {workspace.output}), or give this run another name (run: ...)",
    )
