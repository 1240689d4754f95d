"""Parts of files, small enough to send to another process and unpack there."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Final, Protocol

import pyarrow as pa

from steadytrain.components.preprocess.local_files import open_regular
from steadytrain.components.preprocess.split import DeclaredSide
from steadytrain.components.shared.errors import DataError
from steadytrain.components.tasks.encoding.fields import STRICT_JSON, Defect

CHUNK_BYTES: Final = 1 << 20

Row = tuple[str, int, Mapping[str, Any] | Defect]
"""Source, line (or row, or 1 for a whole file), and content."""

_NO_VALUE = (ValueError, OverflowError, pa.ArrowException)
"""What Arrow raises for values such as a date in the year 30,000."""


class Chunk(Protocol):
    """A part of a file, all of it given to one side. `size` is its share of the file, in bytes."""

    size: int
    given: DeclaredSide

    def rows(self) -> Iterator[Row]:
        """Yield the decoded rows."""


@dataclass
class Lines:
    """Whole lines of a file. `first` is the number of the first line, starting at 1."""

    source: str
    first: int
    block: bytes
    plain: bool
    size: int = 0
    given: DeclaredSide = "train"

    def rows(self) -> Iterator[Row]:
        for line, content in enumerate(self.block.split(b"\n"), start=self.first):
            if content.strip():
                yield self.source, line, self._decode(content.removesuffix(b"\r"))

    def _decode(self, content: bytes) -> Mapping[str, Any] | Defect:
        try:
            text = content.decode()
        except UnicodeDecodeError as error:
            return Defect("bad_encoding", f"byte {error.start} of the line: {error.reason}")
        if self.plain:
            return {"text": text}
        try:
            return as_row(STRICT_JSON.decode(text))
        except (ValueError, RecursionError) as error:
            return Defect("bad_format", f"{not_json(error)}: {error}")


@dataclass
class Rows:
    """Rows that could only be found by decoding them.

    detected: what was found out about the file before its first row, if this chunk has that row.
    """

    source: str
    content: list[tuple[int, Mapping[str, Any] | Defect]]
    size: int = 0
    detected: str = ""
    given: DeclaredSide = "train"

    def rows(self) -> Iterator[Row]:
        return ((self.source, line, row) for line, row in self.content)


@dataclass
class Table:
    """Rows of a columnar file.

    first: the number of the first row, starting at 1.
    detected: as for `Rows`.
    """

    source: str
    first: int
    batch: pa.RecordBatch
    size: int = 0
    detected: str = ""
    given: DeclaredSide = "train"

    def rows(self) -> Iterator[Row]:
        try:
            rows: Iterable[dict[str, Any]] = self.batch.to_pylist()
        except _NO_VALUE:
            rows = map(self._row, range(self.batch.num_rows))
        nested = [field.name for field in self.batch.schema if pa.types.is_nested(field.type)]
        for line, row in enumerate(rows, start=self.first):
            row.update({name: _without_nulls(dict.get(row, name)) for name in nested})
            yield self.source, line, row

    def _row(self, index: int) -> dict[str, Any]:
        row: dict[str, Any] = {}
        unreadable: dict[str, Defect] = {}
        for name, column in zip(self.batch.schema.names, self.batch.columns, strict=True):
            row[name] = None
            try:
                row[name] = column[index].as_py()
            except _NO_VALUE as error:
                detail = f"{name} is a value that Python does not have: {error}"
                unreadable[name] = Defect("bad_format", detail)
        return PartlyReadable(row, unreadable) if unreadable else row


def _without_nulls(value: Any) -> Any:
    """Leave out the null fields of mappings.

    A column has one type, so each mapping has the fields of all others, such as the arguments of
    calls to other tools.
    """
    if isinstance(value, dict):
        return {key: _without_nulls(each) for key, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value


class PartlyReadable(dict[str, Any]):
    """A row with values that cannot be read. It is defective only if one of them is needed."""

    def __init__(self, row: Mapping[str, Any], unreadable: Mapping[str, Defect]) -> None:
        super().__init__(row)
        self._unreadable = unreadable

    def __getitem__(self, name: str) -> Any:
        self._check(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self._check(name)
        return super().get(name, default)

    def _check(self, name: str) -> None:
        """Raise Defect if the value cannot be read."""
        if name in self._unreadable:
            raise self._unreadable[name]


@dataclass
class Files:
    """Whole files: name, path relative to the source, content (truncated just above the limit)."""

    content: list[tuple[str, str, bytes]]
    limit: int
    size: int = 0
    given: DeclaredSide = "train"

    def rows(self) -> Iterator[Row]:
        for name, path, content in self.content:
            yield name, 1, self._record(path, content)

    def _record(self, path: str, content: bytes) -> Mapping[str, Any] | Defect:
        if len(content) > self.limit:
            return Defect("too_long", f"more than {self.limit} bytes")
        try:
            text = content.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            return Defect("bad_encoding", f"byte {error.start}: {error.reason}")
        top, *inner = PurePosixPath(path).parts
        package = top if inner else PurePosixPath(top).name.partition(".")[0]
        return {"text": text, "path": path, "package": package}


class WholeFiles(Files):
    """Files that are a record each: the content as `image`, the folder as `label`, and the `path`.

    A file in no folder has no label.
    """

    def _record(self, path: str, content: bytes) -> Mapping[str, Any] | Defect:
        if len(content) > self.limit:
            return Defect("too_long", f"more than {self.limit:,} bytes")
        return {"image": content, "label": PurePosixPath(path).parent.name or None, "path": path}


@dataclass
class WithFiles:
    """Rows with the names of files in columns: the content of a file replaces its name.

    folder: of the files, with links resolved; others are not read.
    columns: empty for every column whose value ends with one of the suffixes.
    suffixes: that their names end with.
    """

    chunk: Chunk
    folder: Path
    columns: Sequence[str]
    suffixes: frozenset[str]
    limit: int

    def __post_init__(self) -> None:
        self.size, self.given = self.chunk.size, self.chunk.given
        self.detected: str = getattr(self.chunk, "detected", "")

    def rows(self) -> Iterator[Row]:
        for source, line, row in self.chunk.rows():
            try:
                yield source, line, self._filled(row)
            except Defect as defect:
                yield source, line, defect

    def _filled(self, row: Mapping[str, Any] | Defect) -> Mapping[str, Any] | Defect:
        if isinstance(row, Defect):
            return row
        names = {column: row.get(column) for column in self.columns or row}
        contents = {
            column: self._content(column, name)
            for column, name in names.items()
            if isinstance(name, str) and name.strip() and (self.columns or self._fits(name))
        }
        if not contents:
            return row
        filled: Any = copy.copy(row)
        filled.update(contents)
        return filled  # type: ignore[no-any-return]

    def _fits(self, name: str) -> bool:
        return name.strip().lower().endswith(tuple(self.suffixes))

    def _content(self, column: str, name: str) -> bytes:
        shown = f"{column} is {name[:80]!r}"
        try:
            path = Path(os.path.realpath(self.folder / name))
            if not path.is_relative_to(self.folder) or path.suffix.lower() not in self.suffixes:
                raise Defect(
                    "missing_file",
                    f"{shown}, which is not the name of an image in the folder of the table",
                )
            with open_regular(path) as handle:
                content = handle.read(self.limit + 1)
        except (DataError, OSError, ValueError) as error:
            raise Defect("missing_file", f"{shown}, and there is no such file") from error
        if len(content) > self.limit:
            raise Defect("too_long", f"{shown}, a file with more than {self.limit:,} bytes")
        return content


def as_row(value: Any) -> Mapping[str, Any] | Defect:
    """Return a JSON value as a row: its fields, or a defect if it is not an object."""
    if isinstance(value, dict | Defect):
        return value
    hint = "; a list of records is data.format json" if isinstance(value, list) else ""
    return Defect("wrong_type", f"a {type(value).__name__}, not an object with fields{hint}")


def not_json(error: Exception) -> str:
    """Return what is wrong with a text that cannot be decoded as JSON.

    Valid JSON can also be too much for Python: numbers of thousands of digits, and deep nesting.
    """
    return "not JSON" if isinstance(error, json.JSONDecodeError) else "JSON beyond Python's limits"
