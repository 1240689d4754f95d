"""How far a batch prediction has come, so that a repeated command continues after a kill.

Beside the file of predictions, `OUT.progress` names what is predicted and how many records, bytes
of predictions and bytes of refused records are complete, with their digest. It is written after
whole batches only.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, ValidationError

from steadytrain.components.predict.model import ServedModel
from steadytrain.components.preprocess.inputs import Inputs
from steadytrain.components.shared.config import DataConfig
from steadytrain.components.shared.digest import value_digest
from steadytrain.components.shared.storage import LocalStorage

_SECONDS: Final = 1.0
"""Least time between two states on disk, since each waits for the disk."""


@dataclass
class Progress:
    """What has been read so far.

    share: of the bytes of all files; 0 if their size is unknown.
    seen: columns that a record has had, of those that the model reads.
    unread: number of records by column that the model does not read.
    missing: number of records by column whose value the model takes for missing.
    """

    records: int = 0
    predicted: int = 0
    share: float = 0.0
    seen: set[str] = field(default_factory=set)
    unread: Counter[str] = field(default_factory=Counter)
    missing: Counter[str] = field(default_factory=Counter)


class _Saved(BaseModel):
    """What is on disk: `bytes` of predictions and `refused` bytes of the quarantine file.

    digests: of these bytes.
    state: digest of all else here.
    """

    model_config = ConfigDict(extra="forbid")

    key: str
    bytes: int
    refused: int
    digests: list[str]
    records: int
    predicted: int
    seen: list[str]
    unread: dict[str, int]
    missing: dict[str, int]
    state: str = ""

    def digest(self) -> str:
        return value_digest(self.model_dump(exclude={"state"}))


class _Growing:
    """The digest of a file that grows, each byte of which is read once."""

    def __init__(self, path: Path) -> None:
        self._path, self._sum, self._bytes = path, hashlib.sha256(), 0

    def digest(self, size: int) -> str:
        """Return the digest of the first `size` bytes, which are no fewer than the last time."""
        with self._path.open("rb") as handle:
            handle.seek(self._bytes)
            while part := handle.read(min(size - self._bytes, 1 << 20)):
                self._sum.update(part)
                self._bytes += len(part)
        return self._sum.hexdigest()


class SavedProgress:
    """The state of one file of predictions.

    Attributes:
        state: continues where an earlier command with the same key was killed.
        bytes, refused: how much of the two files is kept.
    """

    def __init__(self, partial: Path, refused: Path, key: str) -> None:
        self._partial, self._refused, self._key = partial, refused, key
        self._folder = LocalStorage(partial.parent)
        self._name = partial.with_suffix(".progress").name
        self._written = time.monotonic()
        self._sums = [_Growing(partial), _Growing(refused)]
        saved = self._continued()
        self.bytes, self.refused = (saved.bytes, saved.refused) if saved else (0, 0)
        self.state = Progress()
        if not saved:
            # The predictions that it counts are about to be replaced.
            self.remove()
            self._sums = [_Growing(partial), _Growing(refused)]
        else:
            self.state = Progress(
                records=saved.records,
                predicted=saved.predicted,
                seen={*saved.seen},
                unread=Counter(saved.unread),
                missing=Counter(saved.missing),
            )

    def _continued(self) -> _Saved | None:
        """Return the state of an earlier command with the same key; None if it cannot go on.

        If what it has written is damaged, it cannot.
        """
        try:
            saved = _Saved.model_validate_json((self._partial.parent / self._name).read_bytes())
            if (saved.key, saved.state) != (self._key, saved.digest()):
                return None
            if self._digests(saved.bytes, saved.refused) != saved.digests:
                return None
        except (OSError, ValidationError):
            return None
        return saved

    def _digests(self, *sizes: int) -> list[str]:
        """Return the digests of the beginnings of the two files."""
        return [each.digest(size) for each, size in zip(self._sums, sizes, strict=True)]

    def save(self, state: Progress) -> None:
        """Write the state, unless one has just been written. The two files must be flushed."""
        if time.monotonic() - self._written < _SECONDS:
            return
        sizes = list[int]()
        for path in (self._partial, self._refused):
            with path.open("rb") as handle:
                os.fsync(handle.fileno())
                sizes.append(os.fstat(handle.fileno()).st_size)
        saved = _Saved(
            key=self._key,
            bytes=sizes[0],
            refused=sizes[1],
            digests=self._digests(*sizes),
            records=state.records,
            predicted=state.predicted,
            seen=sorted(state.seen),
            unread=state.unread,
            missing=state.missing,
        )
        whole = saved.model_copy(update={"state": saved.digest()})
        self._folder.write(self._name, whole.model_dump_json().encode())
        self._written = time.monotonic()

    def remove(self) -> None:
        """Remove the state: all records have been read."""
        with contextlib.suppress(FileNotFoundError):
            (self._partial.parent / self._name).unlink()


def key_of(
    model: ServedModel, data: DataConfig, inputs: Inputs, settings: Mapping[str, Any]
) -> str:
    """Return a digest of everything that the predictions and their order depend on."""
    folder = Path(model.address)
    changed: Sequence[Any] = ()
    if folder.is_dir():
        weight = LocalStorage(folder).weigh()
        changed = weight.bytes, weight.newest
    return value_digest(
        [
            model.address,
            model.identity,
            [*changed],
            [[item.name, item.column, item.kind, item.required] for item in model.inputs],
            data.model_dump(mode="json"),
            inputs.digest(),
            [file.name for file, _ in inputs.files],
            dict(settings),
        ]
    )
