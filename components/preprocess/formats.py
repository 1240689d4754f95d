"""Split files into chunks of rows, each small enough to send to another process.

Cheap work (finding line ends) happens while reading. Expensive work (decoding, checking, hashing)
happens where `rows` unpacks the chunk.

jsonl   one object per line
json    a list of objects, or consecutive objects
csv     a header line, then one record per row; the delimiter may be another one
parquet, arrow  one record per row
text    one record per line; blank lines are separators, not records
source  one record per file, with `text`, `path` and `package`
bytes   one record per file, with `image`, `label` and `path`
"""

from __future__ import annotations

import codecs
import io
import itertools
import json
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, Final

from steadytrain.components.preprocess.chunks import (
    CHUNK_BYTES,
    Chunk,
    Files,
    Lines,
    Rows,
    WholeFiles,
    as_row,
    not_json,
)
from steadytrain.components.preprocess.parallel import IsolatedProcess
from steadytrain.components.preprocess.sources import SourceFile, Stream
from steadytrain.components.preprocess.tables import COLUMNAR, LINE_LIMIT, DelimitedRows
from steadytrain.components.shared.config import DataConfig
from steadytrain.components.shared.config.data_sections import SUFFIXES
from steadytrain.components.shared.errors import BadInput, DataError
from steadytrain.components.tasks.encoding.fields import STRICT_JSON, Defect

CHUNK_ROWS: Final = 4096
METADATA: Final = "files that describe the data"
HIDDEN: Final = "hidden files"
UNREAD: Final = "files with a suffix that is not read"
BYTES: Final = "bytes"
"""The format of a file that is a record as it is."""
_DESCRIBING: Final = {
    *("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"),
}
_MARKS: Final = {
    **dict.fromkeys((codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE), "UTF-32"),
    **dict.fromkeys((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE), "UTF-16"),
}
"""How texts in other encodings than UTF-8 begin, the longest first."""

_SEPARATORS = re.compile(r"[\s,]*")


def wanted(
    files: list[SourceFile],
    address: str,
    data: DataConfig,
    left_out: Counter[str] | None = None,
    whole_files: Collection[str] = (),
) -> list[tuple[SourceFile, str]]:
    """Return those files of an address that are read, each with its format.

    A file that the address names is read whatever its suffix. In a folder, the suffix must match,
    and hidden files and those that describe the data are left out.

    Args:
        left_out: counts hidden files, files that describe the data, and those that are not read
            because of their suffix.
        whole_files: suffixes of files that are a record each.

    Raises:
        BadInput: none of the files can be read.
    """
    first, total = files[0].path, len(files)
    files = [file for file in files if not file.hidden]
    if len(files) < total and left_out is not None:
        left_out[HIDDEN] += total - len(files)
    known: dict[str, str] = dict.fromkeys(data.suffixes, "source")
    by_suffix: Mapping[str, str]
    if data.format == "auto" and any(file.suffix.lower() in whole_files for file in files):
        by_suffix = dict.fromkeys(whole_files, BYTES)
    elif data.format == "auto" and not address.startswith("package:"):
        by_suffix = SUFFIXES if any(file.suffix.lower() in SUFFIXES for file in files) else known
    elif data.format in ("auto", "source"):
        by_suffix = known
    else:
        by_suffix = {suffix: name for suffix, name in SUFFIXES.items() if name == data.format}
    named = None if data.format == "auto" else data.format
    suffixes = [file.suffix if by_suffix is known else file.suffix.lower() for file in files]
    formats = (
        (file, by_suffix.get(suffix) if file.listed or named is None else named)
        for file, suffix in zip(files, suffixes, strict=True)
    )
    result = [(file, name) for file, name in formats if name]
    mixed = len({name for _, name in result}) > 1
    read = [
        (file, name)
        for file, name in result
        if name == "source" or not _describes(file, mixed=mixed)
    ]
    if len(read) < len(result) and left_out is not None:
        left_out[METADATA] += len(result) - len(read)
    if len(result) < len(files) and left_out is not None:
        left_out[UNREAD] += len(files) - len(result)
    if not read:
        raise BadInput(
            f"data.source = {address!r}: none of its {total} files (such as "
            f"{first}) has a suffix that is read with data.format = {data.format}",
            remedy=f"set data.format; known suffixes are {', '.join(SUFFIXES)} (each also .gz or "
            f".zst), and of source trees {', '.join(data.suffixes)} (data.suffixes)",
        )
    return read


def _describes(file: SourceFile, *, mixed: bool) -> bool:
    """Return whether a file in a folder describes the data there, as data sets of a hub have.

    Args:
        mixed: whether the folder has files of several formats. Otherwise, a readme is a text.
    """
    name = PurePosixPath(file.path).name.lower()
    return file.listed and (name in _DESCRIBING or (mixed and name.startswith("readme.")))


def read_files(
    files: Iterable[tuple[SourceFile, str]], data: DataConfig, scratch: Path
) -> Iterator[Chunk]:
    """Yield the chunks of files, one file after the other. Small whole files share a chunk.

    Raises:
        DataError: a complete file is corrupted.
    """
    with IsolatedProcess() as isolated:
        whole = Files([], data.max_record_bytes)
        for file, name in files:
            if name in COLUMNAR:
                with file.local(scratch) as path:
                    yield from isolated.iterate(file.name, COLUMNAR[name], file.name, path)
            elif name not in _WHOLE:
                yield from _READERS[name](file, scratch, data)
            else:
                if type(whole) is not _WHOLE[name]:
                    if whole.content:
                        yield whole
                    whole = _WHOLE[name]([], data.max_record_bytes)
                with file.open(scratch) as stream:
                    content = stream.data.read(data.max_record_bytes + 4)
                whole.content.append((file.name, file.path, content))
                whole.size += file.size
                if whole.size >= CHUNK_BYTES or len(whole.content) >= CHUNK_ROWS:
                    yield whole
                    whole = _WHOLE[name]([], data.max_record_bytes)
        if whole.content:
            yield whole


def _read_lines(file: SourceFile, scratch: Path, *, plain: bool) -> Iterator[Chunk]:
    with file.open(scratch) as stream:
        line, seen = 1, 0
        for block in _whole_lines(file.name, stream):
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


def _whole_lines(name: str, stream: Stream) -> Iterator[bytes | None]:
    """Yield blocks that end at line ends. None stands for a line that is too long.

    If the first block has only carriage returns, they end the lines, as on old Macs.

    Raises:
        DataError: the text is UTF-16 or UTF-32.
    """
    first = stream.data.read(CHUNK_BYTES)
    if marked := _marked(first):
        raise DataError(
            f"{name} is {marked}, and this format is read as UTF-8",
            remedy=f"convert it: iconv -f {marked} -t UTF-8 {name}",
        )
    first = first.removeprefix(codecs.BOM_UTF8)
    returns = b"\r" in first[:-1] and b"\n" not in first
    pending, skipping = b"", False
    for block in itertools.chain([first], iter(partial(stream.data.read, CHUNK_BYTES), b"")):
        if returns:
            block = block.replace(b"\r", b"\n")
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


def _marked(start: bytes) -> str:
    """Return the encoding that the mark at the start of a text says; "" for UTF-8."""
    return next((name for mark, name in _MARKS.items() if start.startswith(mark)), "")


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


def _read_json(file: SourceFile, scratch: Path, _: DataConfig) -> Iterator[Chunk]:
    with file.open(scratch) as stream:
        yield from _grouped(file, stream, _json_values(file.name, stream))


def _json_values(name: str, stream: Stream) -> Iterator[tuple[int, Mapping[str, Any] | Defect]]:
    """Yield the items of lists, and consecutive values, numbered from 1."""
    text, _ = _text(stream, None)
    pending, position, number, ended, inside = "", 0, 0, False, False
    while True:
        position = _SEPARATORS.match(pending, position).end()  # type: ignore[union-attr]
        if pending[position : position + 1] == ("]" if inside else "["):
            inside, position = not inside, position + 1
            continue
        try:
            value, end = STRICT_JSON.raw_decode(pending, position)
            # A number could continue in the next block.
            if end == len(pending) and not ended:
                raise json.JSONDecodeError("unfinished", pending, end)
        except (ValueError, RecursionError) as error:
            pending, position = pending[position:], 0
            if not ended and len(pending) > LINE_LIMIT:
                raise DataError(
                    f"{name}: record {number + 1} does not end within {LINE_LIMIT} characters: "
                    f"{error}",
                    remedy="fix the file; if there is an object around the list of records, write "
                    "the list alone, or one record on each line (data.format jsonl)",
                ) from error
            if not ended:
                block = text.read(CHUNK_BYTES)
                pending, ended = pending + block, not block
                continue
            if pending:
                raise DataError(
                    f"{name}: {not_json(error)} after record {number}: {error}",
                    remedy="fix the file or fetch it again; if each line is a record, set "
                    "data.format to jsonl, which quarantines bad lines one by one",
                ) from error
            if inside:
                raise DataError(
                    f"{name}: the list is not closed after record {number}, so the rest is missing",
                    remedy="fetch or write the file again",
                ) from error
            return
        number, position = number + 1, end
        yield number, as_row(value)


def _read_csv(file: SourceFile, scratch: Path, data: DataConfig) -> Iterator[Chunk]:
    with file.open(scratch) as stream:
        text, encoding = _text(stream, data.csv.encoding)
        rows = DelimitedRows(file.name, text, data.csv)
        yield from _grouped(
            file, stream, rows, lambda: " and ".join(filter(None, (rows.detected, encoding)))
        )


def _text(stream: Stream, encoding: str | None) -> tuple[io.TextIOWrapper, str]:
    """Decode a file.

    Args:
        encoding: None means UTF-8, or UTF-16 or UTF-32 if the file begins with its mark.

    Returns:
        The text, with surrogates for bytes that cannot be decoded, and the encoding that was
        detected, or "".
    """
    content, detected = io.BufferedReader(stream.data), ""  # type: ignore[type-var]
    if encoding is None and (marked := _marked(content.peek(4))):
        encoding, detected = marked, f"the encoding {marked}"
    return io.TextIOWrapper(
        content, encoding or "utf-8-sig", errors="surrogateescape", newline=""
    ), detected


def _grouped(
    file: SourceFile,
    stream: Stream,
    rows: Iterable[tuple[int, Mapping[str, Any] | Defect]],
    detected: Callable[[], str] = str,
) -> Iterator[Chunk]:
    """Group rows into chunks as the file's position advances.

    Args:
        detected: returns what `Rows` says of it. The first chunk does.
    """
    seen, content = 0, []
    for row in rows:
        content.append(row)
        here = stream.raw.tell()
        if here - seen >= CHUNK_BYTES or len(content) >= CHUNK_ROWS:
            yield Rows(file.name, content, here - seen, detected())
            seen, content, detected = here, [], str
    yield Rows(file.name, content, file.size - seen, detected())


_WHOLE: Final = {"source": Files, BYTES: WholeFiles}
_READERS: dict[str, Callable[[SourceFile, Path, DataConfig], Iterator[Chunk]]] = {
    "jsonl": lambda file, scratch, _: _read_lines(file, scratch, plain=False),
    "text": lambda file, scratch, _: _read_lines(file, scratch, plain=True),
    "json": _read_json,
    "csv": _read_csv,
}
