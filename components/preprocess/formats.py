"""From files to chunks of rows, each small enough to be handed to another process.

What is cheap (finding the ends of lines) happens while reading, what is costly
(decoding, checking, hashing) where the chunk is unpacked by `rows`.

jsonl   an object a line
json    a list of objects, or objects one after the other
csv     a header line, then a record a row
parquet, arrow  a record a row
text    a record a line; blank lines separate and are no records
source  a record a file, with `text`, `path` and `package`
"""

from __future__ import annotations

import codecs
import contextlib
import csv
import io
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from steadytrain.components.preprocess.chunks import Chunk, Files, Lines, Rows, Table, as_row
from steadytrain.components.preprocess.sources import SourceFile, Stream
from steadytrain.components.preprocess.validate import Defect
from steadytrain.components.shared.config import DataConfig
from steadytrain.components.shared.errors import BadInput, DataError

CHUNK_BYTES: Final = 1 << 20
LINE_LIMIT: Final = 64 << 20
"""A longer line is skipped while it is read, so that memory stays flat."""

SUFFIXES: Final = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".csv": "csv",
    ".parquet": "parquet",
    ".txt": "text",
    ".arrow": "arrow",
}

_SEPARATORS = re.compile(r"[\s,\[]*")


def wanted(files: list[SourceFile], address: str, data: DataConfig) -> list[tuple[SourceFile, str]]:
    """Those of an address's files that are read, each with its format.

    A file that was named is read whatever its suffix; of a folder those whose suffix fits.

    Raises:
        BadInput: none of them can be read.
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
            remedy=f"set data.format; known suffixes are {', '.join(by_suffix)} "
            "(each also .gz or .zst), of source trees those of data.suffixes",
        )
    return found


def read_files(
    files: Iterable[tuple[SourceFile, str]], data: DataConfig, scratch: Path
) -> Iterator[Chunk]:
    """The chunks of files, one after the other. Small whole files share a chunk.

    Raises:
        DataError: a file is damaged as a whole.
    """
    whole = Files([], data.max_record_bytes)
    for file, name in files:
        if name != "source":
            yield from _READERS[name](file, scratch)
            continue
        with file.open(scratch) as stream:
            content = stream.data.read(data.max_record_bytes + 4)
        whole.content.append((file.name, file.path, content))
        whole.size += file.size
        if whole.size >= CHUNK_BYTES:
            yield whole
            whole = Files([], data.max_record_bytes)
    if whole.content:
        yield whole


def tables(
    source: str, batches: Iterable[pa.RecordBatch], row_bytes: float = 0.0
) -> Iterator[Table]:
    """Chunks of record batches; `row_bytes` is what a row takes in its file."""
    first = 1
    for batch in batches:
        rows = max(1, min(batch.num_rows, batch.num_rows * CHUNK_BYTES // max(1, batch.nbytes)))
        for start in range(0, batch.num_rows, rows):
            # Copied, since a slice would take the whole batch along to another process.
            part = batch.take(pa.array(range(start, min(start + rows, batch.num_rows))))
            yield Table(source, first, part, int(part.num_rows * row_bytes))
            first += part.num_rows


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
                yield Lines(file.name, line, block, plain, here - seen)
                line += block.count(b"\n")
            seen = here


def _whole_lines(stream: Stream) -> Iterator[bytes | None]:
    """Blocks that end where a line ends; None stands for a line that is too long to hold."""
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


def _read_json(file: SourceFile, scratch: Path) -> Iterator[Chunk]:
    with file.open(scratch) as stream:
        yield from _grouped(file, stream, _json_values(file.name, stream))


def _json_values(name: str, stream: Stream) -> Iterator[tuple[int, Mapping[str, Any] | Defect]]:
    """Values of a list, or values one after the other, numbered from 1."""
    text = io.TextIOWrapper(stream.data, "utf-8-sig", errors="surrogateescape")
    decoder, pending, number, ended = json.JSONDecoder(), "", 0, False
    position = 0
    while True:
        position = _SEPARATORS.match(pending, position).end()  # type: ignore[union-attr]
        try:
            value, end = decoder.raw_decode(pending, position)
            # A number could go on in the next block.
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
                    remedy="mend or fetch the file again; where each line is a record, "
                    "set data.format to jsonl, and bad lines are quarantined one by one",
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
    reader = csv.reader(text, strict=True)
    header: list[str] = []
    while True:
        line = reader.line_num + 1
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
        elif len(values) != len(header):
            detail = f"{len(values)} fields where the header names {len(header)}"
            yield line, Defect("bad_format", detail)
        else:
            yield line, dict(zip(header, values, strict=True))


def _grouped(
    file: SourceFile, stream: Stream, rows: Iterable[tuple[int, Mapping[str, Any] | Defect]]
) -> Iterator[Chunk]:
    """Rows by the chunk, as the file's position moves on."""
    seen, content = 0, []
    for row in rows:
        content.append(row)
        here = stream.raw.tell()
        if here - seen >= CHUNK_BYTES or len(content) >= 10_000:
            yield Rows(file.name, content, here - seen)
            seen, content = here, []
    yield Rows(file.name, content, file.size - seen)


def _read_parquet(file: SourceFile, scratch: Path) -> Iterator[Chunk]:
    import pyarrow.parquet as pq

    with file.local(scratch) as path, _readable(file):
        content = pq.ParquetFile(path)
        size = file.size / max(1, content.metadata.num_rows)
        yield from tables(file.name, content.iter_batches(batch_size=1024), size)


def _read_arrow(file: SourceFile, scratch: Path) -> Iterator[Chunk]:
    with file.local(scratch) as path, _readable(file), pa.OSFile(str(path), "r") as handle:
        with path.open("rb") as start:
            is_file = start.read(6) == b"ARROW1"
        if is_file:
            reader = pa.ipc.open_file(handle)
            batches: Iterable[Any] = map(reader.get_batch, range(reader.num_record_batches))
        else:
            batches = pa.ipc.open_stream(handle)
        yield from tables(file.name, batches)


@contextlib.contextmanager
def _readable(file: SourceFile) -> Iterator[None]:
    """Names the file where Arrow cannot read it."""
    try:
        yield
    except pa.ArrowException as error:
        raise DataError(
            f"{file.name}: the file cannot be read: {error}",
            remedy="fetch or write it again, or set data.format",
        ) from error


_READERS: dict[str, Callable[[SourceFile, Path], Iterator[Chunk]]] = {
    "jsonl": lambda file, scratch: _read_lines(file, scratch, plain=False),
    "text": lambda file, scratch: _read_lines(file, scratch, plain=True),
    "json": _read_json,
    "csv": _read_csv,
    "parquet": _read_parquet,
    "arrow": _read_arrow,
}
