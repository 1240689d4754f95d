"""Reading a side's Arrow shards column by column, a batch at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from steadytrain.components.shared.arrow_files import open_batches
from steadytrain.components.shared.records import DataRecord, Side


def read_batches(data: DataRecord, side: Side, columns: Sequence[str]) -> Iterator[Any]:
    """Arrow's record batches of a side, memory-mapped, with some of their columns.

    Raises:
        DataError: a shard is damaged.
    """
    for shard in data.sides[side].shards:
        for stored in open_batches(data.path(shard)):
            yield stored.checked().select(list(columns))
