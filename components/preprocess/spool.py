"""The checked records on disk, in parts by content hash, and what is known of each.

A record has a number, by arrival. Texts lie in parts (Arrow streams) by the
first bits of the content hash, so that the parts, each sorted, are the whole in
an order that no order of files changes. What finding duplicates needs (hashes,
sides, signatures) lies in files of its own, an array for each.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
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
    "side": pa.int8(),
    "content": pa.large_string(),
    "label": pa.string(),
    "group": pa.string(),
    "slice": pa.string(),
    "source": pa.string(),
    "line": pa.int64(),
}
SCHEMA: Final = pa.schema(_COLUMNS)

ARRAYS: Final[dict[str, Any]] = {
    "ids": np.dtype((">u8", 2)),
    "sides": np.dtype(np.uint8),
    "labels": np.dtype(np.uint64),
    "variants": np.dtype(np.uint64),
}
"""Kept of every record. `variants` tells apart records of equal content."""


@dataclass
class Batch:
    """Checked records of a chunk: texts by part, and arrays by name, all in one order."""

    parts: list[tuple[int, pa.RecordBatch]]
    arrays: dict[str, NDArray[Any]]
    count: int


class Spool:
    """Writes checked records, then gives them back part by part."""

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
        """Appends a batch; its records are numbered here."""
        for part, rows in batch.parts:
            if part not in self._writers:
                self._writers[part] = pa.ipc.new_stream(str(self.part(part)), SCHEMA)
            numbers = pa.array(np.asarray(rows["number"]) + self.count)
            self._writers[part].write_batch(rows.set_column(0, SCHEMA.field(0), numbers))
        for name, values in batch.arrays.items():
            if name not in self._arrays:
                self._arrays[name] = self.array_path(name).open("wb")
            self._arrays[name].write(np.ascontiguousarray(values).data)
        self.count += batch.count

    def close(self) -> None:
        """Ends the writing; may be called again."""
        closing: Iterable[Any] = (*self._writers.values(), *self._arrays.values())
        for item in closing:
            item.close()
        self._written |= self._writers.keys()
        self._writers, self._arrays = {}, {}

    def part(self, number: int) -> Path:
        return self.folder / f"part-{number:03}.arrows"

    def written(self) -> list[Path]:
        """The parts that hold records, in the order of their hashes."""
        return [self.part(number) for number in sorted(self._written)]

    def array_path(self, name: str) -> Path:
        return self.folder / f"{name}.bin"

    def array(self, name: str) -> NDArray[Any]:
        """An array in memory, one entry a record."""
        return np.fromfile(self.array_path(name), dtype=ARRAYS.get(name, np.dtype(np.uint64)))


def part_of(identity: bytes, parts: int) -> int:
    """The part of a content hash: parts are consecutive ranges of hashes."""
    return int.from_bytes(identity[:4], "big") * parts >> 32


def read_part(path: Path) -> pa.Table:
    """The records of a part, sorted by content hash, then by number."""
    with pa.memory_map(str(path)) as source, pa.ipc.open_stream(source) as reader:
        table = reader.read_all()
    return table.sort_by([("id", "ascending"), ("number", "ascending")])
