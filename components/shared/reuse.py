"""Reuse of a step's outputs.

KFP's own cache decides before any of our code runs, knows nothing about the data behind an address,
and has no age limit. So it is off, and this module is used everywhere. A step's key covers
everything that determines its outputs. An entry is reused if all its files exist with their
original size and digest, and it is recent enough or belongs to the same run, which is then being
continued.
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
    """A file of a result.

    path: relative to the output folder, which may be moved or copied; absolute if it is elsewhere.
    """

    path: str
    bytes: int
    digest: str


class _Entry(Record):
    run_id: str
    created: float
    result: dict[str, Any]
    files: list[_File]


def step_key(*parts: Any, code: tuple[str, ...]) -> str:
    """Return the key of a step's outputs: digest over `parts` (plain data) and the step's code.

    Args:
        parts: everything else that determines the outputs.
        code: the folders of `components` whose code determines the outputs.
    """
    return value_digest([*parts, code_digest(*code)])


class ReuseStore(Generic[R]):
    """Stores the result records of one step."""

    def __init__(self, workspace: Workspace, step: str, result: type[R]) -> None:
        self.workspace, self.result = workspace, result
        self.folder = workspace.output / "reuse" / step

    def find(self, key: str, *, ttl_seconds: float) -> R | None:
        """Return the result for a key, or None if there is no readable and valid one."""
        try:
            entry = self._entry(key)
            result = self.result.model_validate(entry.result)
        except (OSError, ValidationError):
            return None
        young = time.time() - entry.created <= ttl_seconds
        if not (young or entry.run_id == self.workspace.run_id):
            return None
        if not all(_intact(self.workspace.output / file.path, file) for file in entry.files):
            return None
        return result.in_output(self.workspace.output)

    def origin(self, key: str) -> Workspace:
        """Return the workspace of the run that computed the result that `find` returned."""
        return Workspace(self.workspace.output, self._entry(key).run_id)

    def remember(self, key: str, result: R, files: Iterable[Path]) -> None:
        """Store a result together with its files."""
        entry = _Entry(
            run_id=self.workspace.run_id,
            created=time.time(),
            result=result.model_dump(mode="json"),
            files=[
                _File(path=self._name(path), bytes=path.stat().st_size, digest=file_digest(path))
                for path in files
            ],
        )
        entry.save(self._file(key))

    def _name(self, path: Path) -> str:
        output = self.workspace.output
        return str(path.relative_to(output) if path.is_relative_to(output) else path)

    def _entry(self, key: str) -> _Entry:
        return _Entry.model_validate_json(self._file(key).read_bytes())

    def _file(self, key: str) -> Path:
        return self.folder / f"{key}.json"


def _intact(path: Path, file: _File) -> bool:
    try:
        return path.stat().st_size == file.bytes and file_digest(path) == file.digest
    except OSError:
        # Missing, owned by another user, or on a broken disk: the step runs again.
        return False
