"""Split files into chunks of rows, each small enough to send to another process.

Cheap work (finding line ends) happens while reading. Expensive work (decoding, checking, hashing)
happens where `rows` unpacks the chunk.

jsonl   one object per line
json    a list of objects, or consecutive objects
csv     a header line, then one record per row
parquet, arrow  one record per row
text    one record per line; blank lines are separators, not records
source  one record per file, with `text`, `path` and `package`
"""

from __future__ import annotations

import codecs
import csv
import io
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from steadytrain.components.preprocess.apart import Apart
from steadytrain.components.preprocess.chunks import (
    CHUNK_BYTES,
    Chunk,
    Files,
    Lines,
    Rows,
    as_row,
)
from steadytrain.components.preprocess.columnar import COLUMNAR, require_distinct
from steadytrain.components.preprocess.sources import SourceFile, Stream
from steadytrain.components.shared.config import DataConfig
from steadytrain.components.shared.config.data import SUFFIXES
from steadytrain.components.shared.errors import BadInput, DataError
from steadytrain.components.tasks.encoding.fields import STRICT_JSON, Defect

CHUNK_ROWS: Final = 4096
LINE_LIMIT: Final = 64 << 20
"""A longer line is skipped while it is read, to limit memory."""

_SEPARATORS = re.compile(r"[\s,\[]*")


def wanted(files: list[SourceFile], address: str, data: DataConfig) -> list[tuple[SourceFile, str]]:
    """Return those files of an address that are read, each with its format.

    A file that the address names is read whatever its suffix. In a folder, the suffix must match.

    Raises:
        BadInput: none of the files can be read.
    """
    known = dict.fromkeys(data.suffixes, "source")
    if data.format == "auto" and not address.startswith("package:"):
        by_suffix = SUFFIXES if any(file.suffix in SUFFIXES for file in files) else known
    elif data.format in ("auto", "source"):
        by_suffix = known
    else:
        by_suffix = {suffix: name for suffix, name in SUFFIXES.items() if name == data.format}
    named = None if data.format == "auto" else data.format
    formats = (
        (file, by_suffix.get(file.suffix) if file.listed or named is None else named)
        for file in files
    )
    found = [(file, name) for file, name in formats if name]
    if not found:
        raise BadInput(
            f"data.source = {address!r}: none of its {len(files)} files (such as "
            f"{files[0].path}) has a suffix that is read with data.format = {data.format}",
            remedy=f"set data.format; known suffixes are {', '.join(SUFFIXES)} (each also .gz or "
            f".zst), and of source trees {', '.join(data.suffixes)} (data.suffixes)",
        )
    return found


def read_files(
    files: Iterable[tuple[SourceFile, str]], data: DataConfig, scratch: Path
) -> Iterator[Chunk]:
    """Yield the chunks of files, one file after the other. Small whole files share a chunk.

    Raises:
        DataError: a complete file is corrupted.
    """
    with Apart() as apart:
        whole = Files([], data.max_record_bytes)
        for file, name in files:
            if name in COLUMNAR:
                with file.local(scratch) as path:
                    yield from apart.iterate(file.name, COLUMNAR[name], file.name, path)
            elif name != "source":
                yield from _READERS[name](file, scratch)
            else:
                with file.open(scratch) as stream:
                    content = stream.data.read(data.max_record_bytes + 4)
                whole.content.append((file.name, file.path, content))
                whole.size += file.size
                if whole.size >= CHUNK_BYTES or len(whole.content) >= CHUNK_ROWS:
                    yield whole
                    whole = Files([], data.max_record_bytes)
        if whole.content:
            yield whole


def _read_lines(file: SourceFile, scratch: Path, *, plain: bool) -> Iterator[Chunk]:
    with file.open(scratch) as stream:
        line, seen = 1, 0
        for block in _whole_lines(stream):
            here = stream.raw.tell()
            if block is None:
                defect = Defect("too_long", f"a line of more than {LINE_LIMIT} bytes")
                yield Rows(file.name, [(line, defect)], here - seen)
                line += 1
            else:
                for part in _few_lines(block):
                    yield Lines(file.name, line, part, plain, here - seen)
                    line += part.count(b"\n")
                    seen = here
            seen = here


def _whole_lines(stream: Stream) -> Iterator[bytes | None]:
    """Yield blocks that end at line ends. None stands for a line that is too long."""
    pending, skipping = stream.data.read(3).removeprefix(codecs.BOM_UTF8), False
    while block := stream.data.read(CHUNK_BYTES):
        end = block.rfind(b"\n") + 1
        if skipping:
            start = block.find(b"\n") + 1
            if not start:
                continue
            yield None
            pending, skipping = block[start:end], False
        else:
            pending += block[:end]
        if end:
            yield pending
            pending = b""
        pending += block[end:]
        if len(pending) > LINE_LIMIT:
            pending, skipping = b"", True
    if skipping:
        yield None
    elif pending:
        yield pending


def _few_lines(block: bytes) -> Iterator[bytes]:
    """Split a block into parts of at most CHUNK_ROWS lines, because each line needs memory."""
    start = 0
    while start < len(block):
        end = start
        for _ in range(CHUNK_ROWS):
            end = block.find(b"\n", end) + 1
            if not end:
                end = len(block)
                break
        yield block[start:end]
        start = end


def _read_json(file: SourceFile, scratch: Path) -> Iterator[Chunk]:
    with file.open(scratch) as stream:
        yield from _grouped(file, stream, _json_values(file.name, stream))


def _json_values(name: str, stream: Stream) -> Iterator[tuple[int, Mapping[str, Any] | Defect]]:
    """Yield the values of a list, or consecutive values, numbered from 1."""
    text = io.TextIOWrapper(stream.data, "utf-8-sig", errors="surrogateescape")
    decoder, pending, number, ended = STRICT_JSON, "", 0, False
    position = 0
    while True:
        position = _SEPARATORS.match(pending, position).end()  # type: ignore[union-attr]
        try:
            value, end = decoder.raw_decode(pending, position)
            # A number could continue in the next block.
            if end == len(pending) and not ended:
                raise json.JSONDecodeError("unfinished", pending, end)
        except (ValueError, RecursionError) as error:
            pending, position = pending[position:], 0
            block = text.read(CHUNK_BYTES) if len(pending) <= LINE_LIMIT else ""
            if block or not ended:
                pending, ended = pending + block, not block
                continue
            if pending.strip(" \t\r\n]"):
                raise DataError(
                    f"{name}: not JSON after record {number}: {error}",
                    remedy="fix the file or fetch it again; if each line is a record, set "
                    "data.format to jsonl, which quarantines bad lines one by one",
                ) from error
            return
        number, position = number + 1, end
        yield number, as_row(value)


def _read_csv(file: SourceFile, scratch: Path) -> Iterator[Chunk]:
    with file.open(scratch) as stream:
        yield from _grouped(file, stream, _csv_rows(file.name, stream))


def _csv_rows(name: str, stream: Stream) -> Iterator[tuple[int, Mapping[str, Any] | Defect]]:
    text = io.TextIOWrapper(stream.data, "utf-8-sig", errors="surrogateescape", newline="")
    csv.field_size_limit(LINE_LIMIT)
    lines = _CsvLines(name, text)
    reader = csv.reader(lines, strict=True)
    header: list[str] = []
    while True:
        line = reader.line_num + 1
        lines.held = 0
        try:
            values = next(reader, None)
        except csv.Error as error:
            if "unexpected end" in str(error):
                raise DataError(
                    f"{name}: the quote opened in the record of line {line} is never closed",
                    remedy="close it, or fetch the file again",
                ) from error
            yield line, Defect("bad_format", f"not CSV: {error}")
            continue
        if values is None:
            return
        if not values:
            continue
        if not header:
            header = values
            require_distinct(name, header)
        elif len(values) != len(header):
            detail = f"{len(values)} fields where the header names {len(header)}"
            yield line, Defect("bad_format", detail)
        else:
            yield line, dict(zip(header, values, strict=True))


class _CsvLines:
    """The lines of a CSV file. A record that is too long stops reading with an error.

    held: characters read since it was last set to 0, at the start of a record.
    """

    def __init__(self, name: str, text: io.TextIOWrapper) -> None:
        self.name, self.text, self.held = name, text, 0

    def __iter__(self) -> Iterator[str]:
        while line := self.text.readline(LINE_LIMIT + 1):
            self.held += len(line)
            if self.held > LINE_LIMIT:
                raise DataError(
                    f"{self.name}: a record has more than {LINE_LIMIT} characters",
                    remedy="close its quotes, or set data.format if it is not CSV",
                )
            yield line


def _grouped(
    file: SourceFile, stream: Stream, rows: Iterable[tuple[int, Mapping[str, Any] | Defect]]
) -> Iterator[Chunk]:
    """Group rows into chunks as the file's position advances."""
    seen, content = 0, []
    for row in rows:
        content.append(row)
        here = stream.raw.tell()
        if here - seen >= CHUNK_BYTES or len(content) >= CHUNK_ROWS:
            yield Rows(file.name, content, here - seen)
            seen, content = here, []
    yield Rows(file.name, content, file.size - seen)


_READERS: dict[str, Callable[[SourceFile, Path], Iterator[Chunk]]] = {
    "jsonl": lambda file, scratch: _read_lines(file, scratch, plain=False),
    "text": lambda file, scratch: _read_lines(file, scratch, plain=True),
    "json": _read_json,
    "csv": _read_csv,
}
