"""Notes that tracking keeps in the run's folder, and its warnings."""

from __future__ import annotations

import contextlib
import re
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from steadytrain.components.shared.errors import RunBusy, TrackingError
from steadytrain.components.shared.events.types import Warned
from steadytrain.components.shared.lock import lock
from steadytrain.components.shared.quantities import duration
from steadytrain.components.shared.storage import LocalStorage
from steadytrain.components.shared.storage.local import local_errors
from steadytrain.components.shared.workspace import Workspace

RUN = "run"
"""The id of the MLflow run."""

TURN_SECONDS = 30.0
"""Longest wait for another process of this run that is sending to MLflow."""

_IDENTITY, _HOME = "identity", "home"
_FORM = re.compile("[0-9a-f]{32}")


def attempt_note(parent: str, attempt: int) -> str:
    """Return the name of the note with the id of an attempt's MLflow run."""
    return f"{parent}/attempt-{attempt}"


def identity(workspace: Workspace) -> str:
    """Return an id that distinguishes this run from runs with the same name in other folders."""
    LocalStorage(workspace.tracking).write(_IDENTITY, uuid.uuid4().hex.encode(), if_absent=True)
    if not _FORM.fullmatch(recall(workspace, _IDENTITY)):
        # A damaged identity may be the same in other runs, and their MLflow runs would look like
        # ours.
        remember(workspace, _IDENTITY, uuid.uuid4().hex)
    return recall(workspace, _IDENTITY)


class _Home(BaseModel):
    """Which run a folder's notes are about.

    inode: of the folder, which it keeps when it is moved on its file system.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    run: str
    folder: Path
    inode: int

    @classmethod
    def of(cls, workspace: Workspace) -> _Home:
        folder = workspace.folder.resolve()
        return cls(run=workspace.run_id, folder=folder, inode=folder.stat().st_ino)

    def is_of(self, workspace: Workspace) -> bool:
        """Return whether a workspace is the noted one, which may have been moved."""
        here = _Home.of(workspace)
        with contextlib.suppress(OSError):
            return self.run == here.run and self.folder.samefile(here.folder)
        return self.run == here.run and self.inode == here.inode


def settle(workspace: Workspace) -> None:
    """Forget the MLflow runs of another run if the run's folder is a copy of that run's.

    Without this, the copy would continue the original's MLflow run and overwrite its artifacts.

    Raises:
        StorageError: this cannot be noted in the run's folder.
        TrackingError: another process has been doing the same for too long.
    """
    with local_errors("write", workspace.tracking):
        workspace.tracking.mkdir(parents=True, exist_ok=True)
    if recall(workspace, _HOME) == _Home.of(workspace).model_dump_json():
        return
    with exclusive(workspace, "settling"):
        note = recall(workspace, _HOME)
        try:
            home = _Home.model_validate_json(note)
        except ValidationError:
            home = None
        is_copy = home is not None and not home.is_of(workspace)
        if is_copy:
            # The new home is noted last: if this process dies before, another one forgets again.
            for path in workspace.tracking.iterdir():
                if path.is_dir():
                    shutil.rmtree(path)
                elif path.suffix != ".lock" and path.name != _HOME:
                    path.unlink()
        remember(workspace, _HOME, _Home.of(workspace).model_dump_json())
    if is_copy and home is not None:
        warn(
            workspace,
            f"this folder is a copy of run {home.run!r} in {home.folder}; {workspace.run_id!r} "
            "gets a tracking run of its own, and the original's stays as it is",
        )


def remember(workspace: Workspace, name: str, text: str) -> None:
    """Save a note."""
    LocalStorage(workspace.tracking).write(name, text.encode())


def recall(workspace: Workspace, name: str) -> str:
    """Return a note's text; "" if it does not exist or cannot be read."""
    try:
        return LocalStorage(workspace.tracking).read(name).decode()
    except (FileNotFoundError, UnicodeDecodeError):
        return ""


@contextlib.contextmanager
def exclusive(workspace: Workspace, what: str) -> Iterator[None]:
    """Let only one process or thread at a time do something for the run.

    Raises:
        TrackingError: if another one takes longer than TURN_SECONDS.
    """
    try:
        with lock(str(workspace.tracking), what, wait_seconds=TURN_SECONDS):
            yield
    except RunBusy as error:
        raise TrackingError(
            f"another process of run {workspace.run_id!r} has been waiting for the tracking "
            f"store for {duration(TURN_SECONDS)}",
            remedy="none needed: what it does not send is sent at the end of the run",
        ) from error


def warn(workspace: Workspace, message: str) -> None:
    """Add a warning to the run's events."""
    stream = workspace.stream("tracking")
    stream.emit(Warned(stage="tracking", message=message))
    stream.close()
