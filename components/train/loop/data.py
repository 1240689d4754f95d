"""Prepared rows, and each rank's part of a global batch."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from steadytrain.components.shared.arrow_files import open_batches
from steadytrain.components.tasks.base import Row


class Rows(Sequence[Row]):
    """Rows of memory-mapped Arrow files, by global index. Lists come as NumPy arrays.

    Each record batch is checked before its first row is given out.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        self._stored = [stored for file in files for stored in open_batches(file)]
        self.batches = [stored.batch for stored in self._stored]
        self.ends = list(accumulate(batch.num_rows for batch in self.batches))
        self._checked = [False] * len(self.batches)

    def __len__(self) -> int:
        return self.ends[-1] if self.ends else 0

    def __getitem__(self, index: int) -> Row:  # type: ignore[override]  # no slices
        if not 0 <= index < len(self):
            raise IndexError(index)
        number = bisect_right(self.ends, index)
        batch = self.batches[number]
        if not self._checked[number]:
            self._stored[number].checked()
            self._checked[number] = True
        inner = index - (self.ends[number] - batch.num_rows)
        return {name: _value(batch.column(name)[inner]) for name in batch.schema.names}

    def lengths(self, column: str) -> npt.NDArray[np.int32]:
        """How long each row's list in a column is; what the lists hold is not read."""
        lists = (batch.column(column) for batch in self.batches)
        return np.concatenate([np.from_dlpack(pc.list_value_length(item)) for item in lists])

    def check_used(self) -> None:
        """Looks once more at what rows were taken from: it may have changed on the disk since.

        Raises:
            DataError: it has.
        """
        for stored, used in zip(self._stored, self._checked, strict=True):
            if used:
                stored.checked()


def share(items: Sequence[int], rank: int, world_size: int) -> Sequence[int]:
    """A rank's contiguous share; sizes differ by one at most."""
    start, end = (len(items) * part // world_size for part in (rank, rank + 1))
    return items[start:end]


def micro_batches(
    rows: Sequence[Row], limit: int, cost: Callable[[Row], int] = lambda _: 1
) -> Iterator[list[Row]]:
    """Cuts rows, in their order, into parts that cost at most `limit`.

    Args:
        cost: of a row: 1 counts rows, the task's `cost` tokens. A row that
            alone is over the limit makes a part of its own.
    """
    part: list[Row] = []
    spent = 0
    for row in rows:
        spent += (price := cost(row))
        if part and spent > limit:
            yield part
            part, spent = [], price
        part.append(row)
    if part:
        yield part


def _value(scalar: pa.Scalar[Any]) -> Any:
    values = getattr(scalar, "values", None)
    if values is None:
        return scalar.as_py()
    try:
        # Arrow's own conversion imports pandas, a second of each rank's start.
        return np.from_dlpack(values)
    except pa.ArrowException:
        return values.to_numpy(zero_copy_only=False)
