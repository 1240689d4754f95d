"""Reading a side's Arrow shards column by column, a batch at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa

from steadytrain.components.shared.records import DataRecord, Side


def read_batches(data: DataRecord, side: Side, columns: Sequence[str]) -> Iterator[Any]:
    """Arrow's record batches of a side, memory-mapped, with some of their columns."""
    for shard in data.sides[side].shards:
        with pa.memory_map(str(data.path(shard))) as source:
            reader = pa.ipc.open_file(source)
            for index in range(reader.num_record_batches):
                yield reader.get_batch(index).select(list(columns))
