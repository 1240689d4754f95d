"""Rows of tables: Parquet and Arrow files and streams, and delimited files (CSV, TSV)."""

from __future__ import annotations

import contextlib
import csv
import functools
import io
import json
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from steadytrain.components.preprocess.chunks import CHUNK_BYTES, Chunk, Rows, Table
from steadytrain.components.preprocess.local_files import open_regular
from steadytrain.components.shared.class_names import listed
from steadytrain.components.shared.config.data_sections import CsvConfig
from steadytrain.components.shared.errors import DataError
from steadytrain.components.tasks.encoding.fields import Defect

ROW_LIMIT: Final = 64 << 20
"""A larger row is rejected when it is read."""
_ROWS: Final = 64
"""Rows to decode at once. It is small, because rows may be large however small the file is."""


def tables(source: str, batches: Iterable[Any], row_bytes: float = 0.0) -> Iterator[Chunk]:
    """Yield chunks of record batches. `row_bytes` is the size of a row in its file.

    Raises:
        DataError: a batch is invalid.
    """
    first = 1
    with readable(source):
        for batch in batches:
            names, detected = named(source, batch.schema.names)
            if detected:
                metadata = batch.schema.metadata
                batch = batch.rename_columns(names).replace_schema_metadata(metadata)
            batch.validate(full=True)
            for start in range(0, batch.num_rows, _ROWS):
                for part in _small(_decoded(source, batch.slice(start, _ROWS))):
                    chunk = _chunk(source, first, part, int(part.num_rows * row_bytes))
                    chunk.detected = detected if first == 1 else ""
                    yield chunk
                    first += part.num_rows


def named(source: str, names: Sequence[str]) -> tuple[list[str], str]:
    """Name the columns that have no name after their positions, from 1.

    Returns:
        All names, and as for `Rows.detected` which ones are such.

    Raises:
        DataError: a name occurs twice: the last column would silently win.
    """
    result = [name or f"column {index}" for index, name in enumerate(names, start=1)]
    twice = next((name for name, count in Counter(result).items() if count > 1), None)
    if twice is not None:
        raise DataError(
            f"{source}: the column {twice[:80]!r} appears twice",
            remedy="rename one of them, or leave the file out (data.exclude)",
        )
    unnamed = [new for new, name in zip(result, names, strict=True) if not name]
    what = "a column without a name" if len(unnamed) == 1 else "columns without names"
    return result, f"{what}, called {listed([*map(repr, unnamed)])}" if unnamed else ""


@contextlib.contextmanager
def readable(source: str) -> Iterator[None]:
    """Name the file in the error if Arrow cannot read it."""
    try:
        yield
    except pa.ArrowMemoryError:
        raise
    except (pa.ArrowException, OSError) as error:
        raise DataError(
            f"{source}: the file cannot be read: {error}",
            remedy="fetch or write it again, or set data.format",
        ) from error


def _parquet(source: str, path: Path) -> Iterator[Chunk]:
    import pyarrow.parquet as pq

    with open_regular(path) as handle, readable(source):
        size = path.stat().st_size
        # Read with a buffer, so that no full column of a row group is in memory.
        content = pq.ParquetFile(f"/proc/self/fd/{handle.fileno()}", buffer_size=CHUNK_BYTES)
        row_bytes = size / max(1, content.metadata.num_rows)
        yield from tables(source, content.iter_batches(batch_size=_ROWS), row_bytes)


def _arrow(source: str, path: Path) -> Iterator[Chunk]:
    with open_regular(path) as start, readable(source):
        is_file = start.read(6) == b"ARROW1"
        with pa.memory_map(f"/proc/self/fd/{start.fileno()}") as handle:
            if is_file:
                reader = pa.ipc.open_file(handle)
                batches: Iterable[Any] = map(reader.get_batch, range(reader.num_record_batches))
            else:
                batches = pa.ipc.open_stream(handle)
            yield from tables(source, batches)


def _decoded(source: str, batch: Any) -> Any:
    """Replace indices by what they stand for: dictionary columns, and classes with names."""
    classes = _class_names((batch.schema.metadata or {}).get(b"huggingface", b"{}"))
    for index, field in enumerate(batch.schema):
        values = batch.column(index)
        if pa.types.is_dictionary(field.type):
            # A slice would carry its full dictionary.
            values = values.dictionary_decode()
        elif field.name in classes:
            values = _named_classes(source, field.name, values, classes[field.name])
        if values is not batch.column(index):
            batch = batch.set_column(index, field.name, values)
    return batch


@functools.lru_cache(maxsize=8)
def _class_names(metadata: bytes) -> Mapping[str, Sequence[str]]:
    """Return the names of classes by column, from the features that `datasets` writes."""
    try:
        features = json.loads(metadata)["info"]["features"]
        # A list's feature holds that of its items: as `feature`, or in versions before 4 alone.
        items = {
            column: feature[0] if isinstance(feature, list) else feature.get("feature", feature)
            for column, feature in features.items()
        }
        classes = {
            column: feature["names"]
            for column, feature in items.items()
            if isinstance(feature, dict) and feature.get("_type") == "ClassLabel"
        }
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return {}
    return {
        column: names
        for column, names in classes.items()
        if isinstance(names, list) and names and all(isinstance(name, str) for name in names)
    }


def _named_classes(source: str, column: str, values: Any, names: Sequence[str]) -> Any:
    """Return the names of classes; null for -1, which is how `datasets` marks a missing class.

    Args:
        values: classes, or lists of them. Others are returned as they are.

    Raises:
        DataError: a class has no name.
    """
    if pa.types.is_list(values.type):
        ends = np.cumsum([0, *pc.fill_null(pc.list_value_length(values), 0).to_pylist()])
        inner = _named_classes(source, column, values.flatten(), names)
        return pa.ListArray.from_arrays(pa.array(ends, pa.int32()), inner, mask=values.is_null())
    if not pa.types.is_integer(values.type):
        return values
    values = values.cast(pa.int64())
    values = pc.if_else(pc.equal(values, pa.scalar(-1, pa.int64())), None, values)
    bounds: Any = pc.min_max(values).as_py()
    wrong = next((n for n in bounds.values() if n is not None and not 0 <= n < len(names)), None)
    if wrong is not None:
        raise DataError(
            f"{source}: the column {column[:80]!r} holds the class {wrong}, and its ClassLabel "
            f"has only names for 0 to {len(names) - 1}",
            remedy="write the data set again with a name for each class",
        )
    return pa.array(names).take(values)


def _small(batch: Any) -> Iterator[Any]:
    """Yield parts of at most CHUNK_BYTES, or of a single row."""
    if batch.nbytes <= CHUNK_BYTES or batch.num_rows <= 1:
        if batch.num_rows:
            yield batch
        return
    half = batch.num_rows // 2
    yield from _small(batch.slice(0, half))
    yield from _small(batch.slice(half))


def _chunk(source: str, first: int, part: Any, size: int) -> Rows | Table:
    if part.nbytes > ROW_LIMIT:
        defect = Defect("too_long", f"a row of more than {ROW_LIMIT} bytes")
        return Rows(source, [(first, defect)], size)
    table = Table(source, first, part, size)
    try:
        # Copy the rows: a slice would take its full batch with it to another process.
        table.batch = part.take(pa.array(range(part.num_rows)))
    except pa.ArrowNotImplementedError:
        # Arrow cannot copy columns of some types, such as views of texts.
        return Rows(source, [(line, row) for _, line, row in table.rows()], size)
    return table


COLUMNAR: Final[dict[str, Callable[[str, Path], Iterator[Chunk]]]] = {
    "parquet": _parquet,
    "arrow": _arrow,
}


LINE_LIMIT: Final = 64 << 20
"""A longer line or row is a defect, to limit memory."""

_DELIMITERS: Final = (",", "\t", ";", "|")
_ENOUGH: Final = 10
"""So many delimiters, all in the right lines, are no accident of a text."""


@dataclass(frozen=True)
class Dialect:
    """How a file is read.

    detected: says what was found out about the file and is not the default; "" if nothing was.
    spaced: whether a space follows each delimiter. It is not part of the value.
    """

    delimiter: str
    detected: str
    settings: CsvConfig
    spaced: bool = False

    @classmethod
    def of(cls, header: str, settings: CsvConfig) -> Dialect:
        """Return the dialect of a file.

        Args:
            header: its first line. The delimiter that gives it the most fields is the file's.
        """
        marks = _DELIMITERS if settings.delimiter is None else (settings.delimiter,)
        names = {mark: cls(mark, "", settings).values(header) for mark in marks}
        result = max(marks, key=lambda mark: len(names[mark]))
        spaced = len(names[result]) > 1 and all(name[:1] == " " for name in names[result][1:])
        detected = [
            f"the delimiter {result!r}" if result not in (",", settings.delimiter) else "",
            "a space after each delimiter" if spaced else "",
        ]
        return cls(result, " and ".join(filter(None, detected)), settings, spaced)

    def rows(self, lines: Any, *, strict: bool = True) -> Iterator[list[str]]:
        """Parse lines."""
        quotes = self.settings.quotechar
        return csv.reader(
            lines,
            strict=strict,
            delimiter=self.delimiter,
            quotechar=quotes or None,
            quoting=csv.QUOTE_MINIMAL if quotes else csv.QUOTE_NONE,
            escapechar=self.settings.escapechar,
            skipinitialspace=self.spaced,
        )

    def values(self, line: str) -> list[str]:
        """Return the fields of a line that is taken for a complete row."""
        return next(self.rows([line], strict=False), [])


class DelimitedRows:
    """The rows of a file, each with the number of its first line.

    detected: what was found out about the file, as in `Dialect`; with the columns without a name,
        once the first row was read.
    """

    def __init__(self, name: str, text: io.TextIOBase, settings: CsvConfig) -> None:
        csv.field_size_limit(LINE_LIMIT)
        self.name, self.lines = name, _Lines(text)
        self.dialect = Dialect.of(self.lines.first(), settings)
        self.detected = self.dialect.detected

    def __iter__(self) -> Iterator[tuple[int, Mapping[str, Any] | Defect]]:
        header, names = list[str](), list[str]()
        reader = self.dialect.rows(self.lines.take())
        while True:
            held: list[str] = []
            self.lines.held = held
            try:
                values = next(reader, None)
                why = self._swallowed(values, held, len(header)) if len(held) > 1 else ""
            except csv.Error as error:
                values, why = [], f"not CSV: {error}"
            except _TooLong:
                values, why = [], f"a row of more than {LINE_LIMIT} characters"
            first = self.lines.number - len(held) + 1
            if why:
                if len(held) > 1:
                    why += (
                        f"; the quote that opens in line {first} does not close before line "
                        f"{self.lines.number}, so reading continues in line {first + 1}"
                    )
                    self.lines.put_back()
                reader = self.dialect.rows(self.lines.take())
                yield first, Defect("bad_format", why)
            elif values is None:
                return
            elif not values or not (header or any(map(str.strip, values))):
                continue
            elif not header:
                names = values
                header, unnamed = named(self.name, [name.strip() for name in values])
                self.detected = " and ".join(filter(None, (self.detected, unnamed)))
            elif len(values) != len(header) or values == names:
                where = f" in lines {first} to {self.lines.number}" if len(held) > 1 else ""
                detail = f"{len(values)} fields{where} where the header names {len(header)}"
                again = "it is the header again, as in files that were joined"
                yield first, Defect("bad_format", again if values == names else detail)
            else:
                yield first, dict(zip(header, values, strict=True))

    def _swallowed(self, values: list[str] | None, held: list[str], columns: int) -> str:
        """Return why a row of several lines is several rows, or "" if it is one.

        A row with all its quotes closed and the header's number of fields is one, however long,
        unless each line, the first and the last too, has exactly the fields of a row of its own. So
        it is where one stray quote closes another. A text in quotes has lines with more or fewer:
        the delimiters around it are added to its own.
        """
        if columns < 2 or values is None:
            return ""
        wrong = len(values) != columns
        inner = [line for line in held[1 : None if wrong else -1] if line.strip()]
        if len(inner) * (columns - 1) < (1 if wrong else _ENOUGH):
            return ""
        widths = {len(self.dialect.values(line)) for line in inner}
        if not wrong:
            *before, opened = self.dialect.values(held[0])
            widths.add(len(before) + len(self.dialect.values(opened)))
            widths.add(len(self.dialect.values(held[-1])))
        if widths != {columns}:
            return ""
        return f"{len(inner)} lines in one row have the {columns} fields of a row of their own"


class _TooLong(Exception):
    """A row takes too much memory."""


class _Lines:
    """The lines of a file, which can be put back.

    number: of the line that was taken last, starting at 1.
    held: the lines that were taken for the row that is being read.
    """

    def __init__(self, text: io.TextIOBase) -> None:
        self.text, self.number = text, 0
        self.held: list[str] = []
        self._again: deque[str] = deque()

    def first(self) -> str:
        """Return the first line that has text. All lines are taken later."""
        while line := self._read():
            self._again.append(line)
            if line.strip():
                break
        return line

    def take(self) -> Iterator[str]:
        """Yield the lines that follow.

        Raises:
            _TooLong: the row's lines take too much memory.
        """
        size, row = 0, self.held
        while line := self._again.popleft() if self._again else self._read():
            self.number += 1
            if row is not self.held:
                size, row = 0, self.held
            size += len(line)
            row.append(line)
            if size > LINE_LIMIT:
                if len(line) > LINE_LIMIT:
                    self._skip(line)
                raise _TooLong
            yield line

    def put_back(self) -> None:
        """Put back all lines of the row but its first."""
        self._again.extendleft(reversed(self.held[1:]))
        self.number -= len(self.held) - 1

    def _read(self) -> str:
        return self.text.readline(LINE_LIMIT + 1)

    def _skip(self, start: str) -> None:
        """Read the rest of a line that is too long."""
        while start and not start.endswith(("\n", "\r")):
            start = self._read()
