"""Using a step's outputs again.

KFP's own cache decides before any of our code runs, knows nothing of the data
behind an address, and has no age limit; so it is off, and this is used
everywhere alike. A step's key covers all that decides its outputs. An entry is
used where each of its files is present with the size and digest it had, and
it is young enough, or belongs to the same run, which is then being continued.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import ValidationError

from steadytrain.components.shared.digest import code_digest, file_digest, value_digest
from steadytrain.components.shared.records import Record
from steadytrain.components.shared.workspace import Workspace

R = TypeVar("R", bound=Record)


class _File(Record):
    path: str
    bytes: int
    digest: str


class _Entry(Record):
    run_id: str
    created: float
    result: dict[str, Any]
    files: list[_File]


def step_key(*parts: Any, rooms: tuple[str, ...]) -> str:
    """The key of a step's outputs: digest over `parts` (plain data) and the step's code.

    Args:
        rooms: the folders of `components` that the outputs come from.
    """
    return value_digest([*parts, code_digest(*rooms)])


class ReuseStore(Generic[R]):
    """Remembers the result records of one step."""

    def __init__(self, workspace: Workspace, step: str, result: type[R]) -> None:
        self.workspace, self.result = workspace, result
        self.folder = workspace.output / "reuse" / step

    def find(self, key: str, *, ttl_seconds: float) -> R | None:
        """The result for a key, or None where there is none that can be read and relied on."""
        try:
            entry = _Entry.model_validate_json((self.folder / f"{key}.json").read_bytes())
            result = self.result.model_validate(entry.result)
        except (OSError, ValidationError):
            return None
        young = time.time() - entry.created <= ttl_seconds
        if not (young or entry.run_id == self.workspace.run_id):
            return None
        return result if all(map(_intact, entry.files)) else None

    def remember(self, key: str, result: R, files: Iterable[Path]) -> None:
        """Stores a result with the files that it stands for."""
        entry = _Entry(
            run_id=self.workspace.run_id,
            created=time.time(),
            result=result.model_dump(mode="json"),
            files=[
                _File(path=str(path), bytes=path.stat().st_size, digest=file_digest(path))
                for path in files
            ],
        )
        entry.save(self.folder / f"{key}.json")


def _intact(file: _File) -> bool:
    path = Path(file.path)
    try:
        return path.stat().st_size == file.bytes and file_digest(path) == file.digest
    except OSError:
        # Gone, another user's, or on a broken disk: the step does its work again.
        return False
