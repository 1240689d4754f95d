"""Read one column of a memory-mapped record batch, row by row.

A file can be damaged while it is in use. Arrow trusts offsets that it has checked before: one that
now points outside its buffer aborts the process, or makes it allocate gigabytes. This module checks
each offset against the size of its buffer every time it is used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np
import pyarrow as pa

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
        found = [number for is_type, number in _OFFSETS.items() if is_type(array.type)]
        if found and len(array):
            offsets = array.buffers()[1]
            last = array.offset + len(array)
            self._offsets = np.frombuffer(offsets, found[0])[array.offset : last + 1]
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
