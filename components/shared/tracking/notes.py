"""Notes that tracking keeps in the run's folder, and its warnings."""

from __future__ import annotations

import contextlib
import re
import uuid
from collections.abc import Iterator

from steadytrain.components.shared.errors import RunBusy, TrackingError
from steadytrain.components.shared.events.types import Warned
from steadytrain.components.shared.lease import lease
from steadytrain.components.shared.quantities import duration
from steadytrain.components.shared.storage import LocalStorage
from steadytrain.components.shared.workspace import Workspace

RUN = "run"
"""The id of the MLflow run."""

TURN_SECONDS = 30.0
"""Longest wait for another process of this run that is sending to MLflow."""

_IDENTITY = "identity"
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
        with lease(str(workspace.tracking), what, wait_seconds=TURN_SECONDS):
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
