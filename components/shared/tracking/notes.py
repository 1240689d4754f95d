"""What tracking remembers in the run's folder, and how it speaks up."""

from __future__ import annotations

from steadytrain.components.shared.events.types import Warned
from steadytrain.components.shared.storage import LocalStorage
from steadytrain.components.shared.workspace import Workspace

RUN = "run"
"""The id of the MLflow run."""

UNDELIVERED = "undelivered"
"""There from a sink's start until all of its events are with MLflow."""


def attempt_note(parent: str, attempt: int) -> str:
    """Where the id of an attempt's MLflow run is kept."""
    return f"{parent}/attempt-{attempt}"


def remember(workspace: Workspace, name: str, text: str) -> None:
    """Keeps a small fact."""
    LocalStorage(workspace.tracking).write(name, text.encode())


def recall(workspace: Workspace, name: str) -> str:
    """What was kept; "" where there is nothing."""
    try:
        return LocalStorage(workspace.tracking).read(name).decode()
    except FileNotFoundError:
        return ""


def forget(workspace: Workspace, name: str) -> None:
    """Keeps it no longer."""
    LocalStorage(workspace.tracking).delete(name)


def warn(workspace: Workspace, message: str) -> None:
    """Says something among the run's events."""
    stream = workspace.stream("tracking")
    stream.emit(Warned(stage="tracking", message=message))
    stream.close()
