"""What the check for new data of a pipeline run found, for the report of that run.

The check comes before the run, which may never start, so it is not kept in the run's folder.
"""

from __future__ import annotations

from pydantic import ValidationError

from steadytrain.components.shared.errors import Unreadable
from steadytrain.components.shared.records import Record
from steadytrain.components.shared.storage import LocalStorage
from steadytrain.components.shared.workspace import Workspace


class DataCheck(Record):
    """The result of a check.

    found: whether there is something new to train on. reason: why, in a sentence.
    failure: error, message and remedy, if the check failed.
    """

    found: bool = False
    reason: str = ""
    failure: dict[str, str] | None = None


def keep(workspace: Workspace, job: str, check: DataCheck) -> None:
    """Store the result of a pipeline run's check.

    Args:
        job: KFP's id of the run.
    """
    _storage(workspace).write(_name(job), check.model_dump_json().encode())


def checked(workspace: Workspace, job: str) -> DataCheck | None:
    """Return the result of a pipeline run's check, and forget it; None if there is none."""
    storage = _storage(workspace)
    try:
        found = DataCheck.model_validate_json(storage.read(_name(job)))
    except (FileNotFoundError, Unreadable, ValidationError):
        return None
    storage.delete(_name(job))
    return found


def _storage(workspace: Workspace) -> LocalStorage:
    return LocalStorage(workspace.checks)


def _name(job: str) -> str:
    return f"{job}.json"
