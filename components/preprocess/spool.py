"""The checked records on disk, in parts by content hash, and arrays with facts about each record.

A record has a number, in order of arrival. Texts are in parts (Arrow streams) by the first bits of
the content hash. Each part is sorted when it is read, so the parts together are the data set in an
order that does not depend on the order of the files. What duplicate detection needs (hashes,
places, signatures) is in separate files, one array per file.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from steadytrain.components.preprocess.split import ID_BYTES

PART_BYTES: Final = 4 << 20
MAX_PARTS: Final = 512

_COLUMNS: Final[dict[str, pa.DataType]] = {
    "number": pa.int64(),
    "id": pa.binary(ID_BYTES),
    "content": pa.large_string(),
    "attachment": pa.large_binary(),
    "label": pa.string(),
    "group": pa.string(),
    "slice": pa.string(),
    "difficulty": pa.float64(),
    "source": pa.string(),
    "line": pa.int64(),
}
SCHEMA: Final = pa.schema(_COLUMNS)

ARRAYS: Final[dict[str, Any]] = {
    "ids": np.dtype((">u8", 2)),
    "places": np.dtype(np.uint64),
    "labels": np.dtype(np.uint64),
    "variants": np.dtype(np.uint64),
    "given": np.dtype(np.uint8),
}
"""Stored for every record. `variants` distinguishes records with equal content, and `given` is the
index in SIDES of the side that the data give, which is TRAIN if they give none.
"""


@dataclass
class Batch:
    """Checked records of a chunk.

    parts: which rows go to which part: the number of the part, the first row, and the one after the
        last.
    arrays: by name, in the order of the record numbers in `rows`.
    """

    parts: list[tuple[int, int, int]]
    arrays: dict[str, NDArray[Any]]
    count: int
    rows: pa.RecordBatch = field(default_factory=lambda: pa.RecordBatch.from_pylist([], SCHEMA))


class Spool:
    """Writes checked records, then returns them part by part."""

    def __init__(self, folder: Path, expected_bytes: int | None) -> None:
        self.folder = folder
        folder.mkdir(parents=True)
        wanted = MAX_PARTS if expected_bytes is None else 1 + expected_bytes // PART_BYTES
        self.parts = min(MAX_PARTS, wanted)
        self.count = 0
        self._written: set[int] = set()
        self._writers: dict[int, pa.RecordBatchStreamWriter] = {}
        self._arrays: dict[str, BinaryIO] = {}

    def add(self, batch: Batch) -> None:
        """Append a batch and number its records."""
        numbers = pa.array(np.asarray(batch.rows["number"]) + self.count)
        rows = batch.rows.set_column(0, SCHEMA.field(0), numbers)
        for part, start, stop in batch.parts:
            if part not in self._writers:
                self._writers[part] = pa.ipc.new_stream(str(self.part(part)), SCHEMA)
            self._writers[part].write_batch(rows.slice(start, stop - start))
        for name, values in batch.arrays.items():
            if name not in self._arrays:
                self._arrays[name] = self.array_path(name).open("wb")
            self._arrays[name].write(np.ascontiguousarray(values).data)
        self.count += batch.count

    def close(self) -> None:
        """Finish writing. It is safe to call this again."""
        closing: Iterable[Any] = (*self._writers.values(), *self._arrays.values())
        for item in closing:
            item.close()
        self._written |= self._writers.keys()
        self._writers, self._arrays = {}, {}

    def part(self, number: int) -> Path:
        return self.folder / f"part-{number:03}.arrows"

    def written(self) -> list[Path]:
        """Return the parts that have records, in the order of their hashes."""
        return [self.part(number) for number in sorted(self._written)]

    def array_path(self, name: str) -> Path:
        return self.folder / f"{name}.bin"

    def array(self, name: str) -> NDArray[Any]:
        """Load an array into memory, one entry per record."""
        return np.fromfile(self.array_path(name), dtype=ARRAYS.get(name, np.dtype(np.uint64)))


def part_of(identity: bytes, parts: int) -> int:
    """Return the part of a content hash. Parts are consecutive ranges of hashes."""
    return int.from_bytes(identity[:4], "big") * parts >> 32


def text_batches(path: Path) -> Iterator[pa.RecordBatch]:
    """Yield the records of a part as they were written, without reading what is not looked at."""
    with pa.memory_map(str(path)) as source, pa.ipc.open_stream(source) as reader:
        yield from reader


def read_part(path: Path) -> pa.Table:
    """Read the records of a part, sorted by content hash, then by number."""
    with pa.memory_map(str(path)) as source, pa.ipc.open_stream(source) as reader:
        table = reader.read_all()
    return table.sort_by([("id", "ascending"), ("number", "ascending")])
