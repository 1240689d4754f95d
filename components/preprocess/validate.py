"""Check every record, and name what is wrong with a bad one.

A defect is the record's own fault and counts against `data.max_bad_share`. A record may also be
quarantined because of other records (a duplicate, a leak, a conflicting label). Such a record is
good, and does not count.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from steadytrain.components.preprocess.split import content_id, hashed
from steadytrain.components.shared.config import DataConfig
from steadytrain.components.shared.errors import DataError
from steadytrain.components.tasks.encoding.base import Encoder
from steadytrain.components.tasks.encoding.chat import ChatEncoder
from steadytrain.components.tasks.encoding.fields import (
    NAME_BYTES,
    Defect,
    name_of,
    number_of,
    utf8_size,
)
from steadytrain.components.tasks.encoding.preference import PreferenceEncoder

JUDGED_REMEDY: Final = (
    "keep the good records only, and drop or rename the column; if it is only for information, "
    "name it in data.columns.slice; pairs of a good and a bad answer are for data.task preference, "
    "and a prompt, a completion and a yes or no as data.columns.label for data.task "
    "unpaired_preference"
)
"""The fix for records with the reason "judged"."""

_COLUMNS: Final = 50
"""Columns of a row to look at, of those that are not read."""


def no_records(data: DataConfig) -> DataError:
    """Return the error for data without a record."""
    named = ", ".join(f"{name} = {address}" for name, address in data.addresses)
    return DataError(f"{named}: no record is there", remedy="give a data set that is not empty")


@dataclass(frozen=True)
class Checked:
    """A good record. `content` is `Content.text`, and `attachment` belongs to it.

    difficulty: for a curriculum by column; None without one.
    unread, noticed: as in `Content`.
    """

    identity: bytes
    content: str
    label: str | None
    group: str | None
    slice: str | None
    difficulty: float | None = None
    attachment: bytes = b""
    unread: Mapping[str, int] = field(default_factory=dict, compare=False)
    noticed: str = ""


def check(
    row: Mapping[str, Any], data: DataConfig, encoder: Encoder, difficulty: str | None = None
) -> Checked:
    """Return the record of a row.

    Args:
        difficulty: column with the record's difficulty; None if there is no curriculum by column.

    Raises:
        Defect: the first problem with the row.
    """
    columns, content = data.columns, encoder.read(row)
    if isinstance(encoder, ChatEncoder | PreferenceEncoder):
        encoder.check_unjudged(row, (columns.group, columns.slice))
    size = utf8_size(content.text) + len(content.attachment)
    if size > data.max_record_bytes:
        limit = f"data.max_record_bytes = {data.max_record_bytes:,}"
        raise Defect("too_long", f"the record has {size:,} bytes, more than {limit}")
    group = name_of(row, columns.group, limit=math.inf) if columns.group else None
    named = name_of(row, columns.slice) if columns.slice and row.get(columns.slice) != "" else None
    if columns.group and not (group or "").strip():
        raise Defect("missing_field", f"{columns.group} (the group) is absent, null or empty")
    if group is None and data.group_by_prompt and content.prompt is not None:
        group = hashed(" ".join(content.prompt.split()))
    elif group is not None and utf8_size(group) > NAME_BYTES:
        group = hashed(group)
    hard = number_of(row, difficulty) if difficulty else None
    return Checked(
        content_id(content.text if content.identity is None else content.identity),
        content.text,
        content.label,
        group,
        data.part or named,
        hard,
        content.attachment,
        content.unread,
        content.noticed,
    )


def needed_columns(
    data: DataConfig, encoder: Encoder, difficulty: str | None = None
) -> list[list[str]]:
    """Return alternative lists of columns. The data must have all columns of one of them."""
    asked = (data.columns.group, data.columns.slice, difficulty)
    more = [column for column in asked if column]
    return [[*columns, *more] for columns in encoder.columns()]


class ColumnUse:
    """Counts what a task makes of good rows, by their columns.

    layouts: number of rows by the layout that was detected.
    unused: number of rows by column that nothing reads: with text, or a structure that may hold
        some, and with numbers if the encoder has `reads_numbers`.
    """

    def __init__(self, data: DataConfig, encoder: Encoder, difficulty: str | None = None) -> None:
        self.layouts: Counter[str] = Counter()
        self.unused: Counter[str] = Counter()
        self._encoder, self._numbers = encoder, getattr(encoder, "reads_numbers", False)
        self._asked = {data.columns.group, data.columns.slice, difficulty}
        self._found: dict[tuple[str, ...], tuple[str, list[str]]] = {}

    def count(self, row: Mapping[str, Any]) -> None:
        """Count a row that has no defect."""
        # What an encoder reads depends on which columns are not null, so it is traced once for
        # each set of them.
        columns = tuple(row)
        if None in row.values():
            columns = tuple(name for name in columns if row[name] is not None)
        use = self._found.get(columns)
        if use is None:
            use = self._found[columns] = self._trace(row, columns)
        layout, unread = use
        if layout:
            self.layouts[layout] += 1
        for name in unread:
            if _has_text(row[name]) or (self._numbers and isinstance(row[name], int | float)):
                self.unused[name] += 1

    def _trace(self, row: Mapping[str, Any], columns: Sequence[str]) -> tuple[str, list[str]]:
        traced = _ReadRow(row)
        content = self._encoder.read(traced)
        used = traced.read | self._asked
        return content.layout, [name for name in columns if name not in used][:_COLUMNS]


class _ReadRow(Mapping[str, Any]):
    """A row that remembers which of its columns were read."""

    def __init__(self, row: Mapping[str, Any]) -> None:
        self._row = row
        self.read: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self.read.add(name)
        return self._row[name]

    def __contains__(self, name: object) -> bool:
        return name in self._row

    def __iter__(self) -> Iterator[str]:
        return iter(self._row)

    def __len__(self) -> int:
        return len(self._row)


def _has_text(value: Any) -> bool:
    if isinstance(value, str):
        return bool(value) and not value.isspace()
    return isinstance(value, list | dict) and bool(value)
