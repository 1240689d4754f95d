"""Prepared rows, and each rank's share of a global batch."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from steadytrain.components.shared.arrow_files import DIFFICULTY, TEXT, open_batches
from steadytrain.components.shared.errors import DataError
from steadytrain.components.shared.records import DataRecord, Side
from steadytrain.components.tasks.base import Row, TrainingTask

# Read one column of a memory-mapped record batch, row by row.
#
# A file can be damaged while it is in use. Arrow trusts offsets that it has checked before: one
# that now points outside its buffer aborts the process, or makes it allocate gigabytes. This
# module checks each offset against the size of its buffer every time it is used.

_OFFSETS: Final[Mapping[Callable[[Any], bool], type[np.signedinteger[Any]]]] = {
    pa.types.is_list: np.int32,
    pa.types.is_large_list: np.int64,
    pa.types.is_string: np.int32,
    pa.types.is_large_string: np.int64,
}


class MappedColumn:
    """Returns lists as NumPy arrays, without a copy if they hold plain numbers and no nulls."""

    def __init__(self, array: Any) -> None:
        self._array = array
        self._nulls = array.null_count > 0
        self._offsets = None
        types = [number for is_type, number in _OFFSETS.items() if is_type(array.type)]
        if types and len(array):
            offsets = array.buffers()[1]
            last = array.offset + len(array)
            self._offsets = np.frombuffer(offsets, types[0])[array.offset : last + 1]
            self._end, self._part = _parts(array)

    def __getitem__(self, row: int) -> Any:
        """Return the value of a row.

        Raises:
            IndexError: the row's offsets are damaged.
        """
        if self._offsets is None or (self._nulls and not self._array[row].is_valid):
            return self._array[row].as_py()
        start, end = map(int, self._offsets[row : row + 2])
        if not 0 <= start <= end <= self._end:
            raise IndexError(f"row {row} has the offsets {start} and {end} of {self._end}")
        return self._part(start, end)


def _parts(array: Any) -> tuple[int, Callable[[int, int], Any]]:
    """Return the total number of items in all rows, and a function that returns a range of them."""
    if not pa.types.is_nested(array.type):
        text = memoryview(array.buffers()[2] or b"")
        return len(text), lambda start, end: str(text[start:end], "utf-8")
    items = array.values
    try:
        # Arrow's own conversion imports pandas, which adds a second to the start of each rank.
        numbers = np.from_dlpack(items)
    except pa.ArrowException:
        return len(items), lambda start, end: items[start:end].to_numpy(zero_copy_only=False)
    return len(numbers), lambda start, end: numbers[start:end]


class Rows(Sequence[Row]):
    """Rows of memory-mapped Arrow files, by global index. Lists are returned as NumPy arrays.

    Each record batch is checked before its first row is returned.

    Args:
        extra: has further columns for each row.
    """

    def __init__(self, files: Sequence[Path], extra: Rows | None = None) -> None:
        self.extra = extra
        self._stored = [stored for file in files for stored in open_batches(file)]
        self.batches = [stored.batch for stored in self._stored]
        self.ends = list(accumulate(batch.num_rows for batch in self.batches))
        self._columns: dict[int, dict[str, MappedColumn]] = {}

    @classmethod
    def of(cls, data: DataRecord, side: Side) -> Rows:
        """Return the rows of a side."""
        return cls([data.path(name) for name in data.sides[side].shards])

    def __len__(self) -> int:
        return self.ends[-1] if self.ends else 0

    def __getitem__(self, index: int) -> Row:  # type: ignore[override]  # no slices
        if not 0 <= index < len(self):
            raise IndexError(index)
        number = bisect_right(self.ends, index)
        batch = self.batches[number]
        if number not in self._columns:
            self._stored[number].checked()
            self._columns[number] = {
                name: MappedColumn(batch.column(name))
                for name in batch.schema.names
                if name != DIFFICULTY
            }
        inner = index - (self.ends[number] - batch.num_rows)
        row = {name: column[inner] for name, column in self._columns[number].items()}
        return row if self.extra is None else {**row, **self.extra[index]}

    def lengths(self, column: str) -> npt.NDArray[np.int32]:
        """Return the length of each row's list in a column, without reading the lists' items."""
        lists = (batch.column(column) for batch in self.batches)
        return np.concatenate([np.from_dlpack(pc.list_value_length(item)) for item in lists])

    @property
    def columns(self) -> list[str]:
        """The names of the columns that all files have."""
        schemas = [set(batch.schema.names) for batch in self.batches]
        return sorted(set.intersection(*schemas)) if schemas else []

    def values(self, column: str) -> npt.NDArray[Any]:
        """Return the number of each row in a column, with the column's type."""
        return np.concatenate([np.from_dlpack(batch.column(column)) for batch in self.batches])

    def check_texts(self) -> None:
        """Check that rows have the texts that augmentation changes.

        Raises:
            DataError: the data were prepared without them.
        """
        if TEXT not in self.columns:
            raise DataError(
                "the data were prepared without training.augmentation, so rows have no texts",
                remedy="run the preprocess step again",
            )

    def check_used(self) -> None:
        """Check the used record batches again: they may have changed on disk since they were read.

        Raises:
            DataError: a record batch changed.
        """
        for number in sorted(self._columns):
            self._stored[number].checked()
        if self.extra is not None:
            self.extra.check_used()


def drawn(task: TrainingTask, row: Row, position: int, *, training: bool) -> Row:
    """Return what a task learns from a row at a position, as `TrainingTask.draw` does.

    A task without that method learns from the row itself.
    """
    draw = getattr(task, "draw", None)
    return row if draw is None else draw(row, position, training=training)


def share(items: Sequence[int], rank: int, world_size: int) -> Sequence[int]:
    """Return a rank's contiguous share. Sizes differ by at most one."""
    start, end = (len(items) * part // world_size for part in (rank, rank + 1))
    return items[start:end]
