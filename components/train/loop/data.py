"""Prepared rows, and each rank's share of a global batch."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow.compute as pc

from steadytrain.components.shared.added_columns import DIFFICULTY, TEXT
from steadytrain.components.shared.arrow_files import open_batches
from steadytrain.components.shared.errors import DataError
from steadytrain.components.tasks.base import Row, TrainingTask
from steadytrain.components.train.loop.mapped_column import MappedColumn


class Rows(Sequence[Row]):
    """Rows of memory-mapped Arrow files, by global index. Lists are returned as NumPy arrays.

    Each record batch is checked before its first row is returned.

    Args:
        beside: has further columns for each row.
    """

    def __init__(self, files: Sequence[Path], beside: Rows | None = None) -> None:
        self.beside = beside
        self._stored = [stored for file in files for stored in open_batches(file)]
        self.batches = [stored.batch for stored in self._stored]
        self.ends = list(accumulate(batch.num_rows for batch in self.batches))
        self._columns: dict[int, dict[str, MappedColumn]] = {}

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
        found = {name: column[inner] for name, column in self._columns[number].items()}
        return found if self.beside is None else {**found, **self.beside[index]}

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
        if self.beside is not None:
            self.beside.check_used()


def drawn(task: TrainingTask, row: Row, place: int, *, training: bool) -> Row:
    """Return what a task learns from a row at a place, as `TrainingTask.draw` does.

    A task without that method learns from the row itself.
    """
    draw = getattr(task, "draw", None)
    return row if draw is None else draw(row, place, training=training)


def share(items: Sequence[int], rank: int, world_size: int) -> Sequence[int]:
    """Return a rank's contiguous share. Sizes differ by at most one."""
    start, end = (len(items) * part // world_size for part in (rank, rank + 1))
    return items[start:end]


def micro_batches(
    rows: Sequence[Row], limit: int, cost: Callable[[Row], int] = lambda _: 1
) -> Iterator[list[Row]]:
    """Split rows, in order, into parts that cost at most `limit`.

    Args:
        cost: cost of a row. 1 counts rows; the task's `cost` counts tokens. A row that exceeds the
            limit by itself gets its own part.
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
