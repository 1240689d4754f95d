"""Shards that the training loop maps into memory, and the index for finding a row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from steadytrain.components.preprocess.pack import best_fit
from steadytrain.components.shared.arrow_files import write_batch
from steadytrain.components.shared.records import Side, SideRecord

SHARD_BYTES: Final = 256 << 20
BATCH_ROWS: Final = 256
BATCH_TOKENS: Final = 1 << 17
"""Limits a record batch. Reading one row reads and checks its full batch."""

_PACKED_COLUMNS: Final[dict[str, pa.DataType]] = {
    "input_ids": pa.list_(pa.int32()),
    "targets": pa.list_(pa.int8()),
    "lengths": pa.list_(pa.int32()),
}
PACKED: Final = pa.schema(_PACKED_COLUMNS)
CLASSES: Final = pa.schema([("input_ids", pa.list_(pa.int32())), ("label", pa.int32())])
INDEX: Final = pa.schema(
    [
        pa.field("shard", pa.int32()),
        pa.field("row", pa.int32()),
        pa.field("tokens", pa.int32()),
        pa.field("targets", pa.int32()),
        pa.field("documents", pa.list_(pa.string())),
    ]
)
"""One row of the index per row of the shards, in order: where it is and what is in it."""


@dataclass(frozen=True)
class Window:
    """A window of a document, as prepared."""

    document: str
    input_ids: NDArray[np.int32]
    targets: NDArray[np.int8]
    label: int | None

    def __len__(self) -> int:
        return len(self.input_ids)


def write_side(
    side: Side, parts: Sequence[Path], folder: Path, *, task: str, capacity: int, documents: int
) -> SideRecord:
    """Write <side>/shard-00000.arrow and so on, and <side>/index.arrow.

    Args:
        parts: files of windows, in the order of content hashes.
        folder: the data folder.
        capacity: tokens per sequence.
        documents: number of records on this side.
    """
    (folder / side).mkdir(parents=True)
    classes = task == "sequence_classification"
    output = _Shards(folder, side, CLASSES if classes else PACKED)
    windows = (window for part in parts for window in _read(part))
    sequences = ([window] for window in windows) if classes else best_fit(windows, capacity)
    for sequence in sequences:
        output.add(sequence)
    return output.close(documents)


def _read(part: Path) -> Iterator[Window]:
    with pa.memory_map(str(part)) as source:
        reader = pa.ipc.open_file(source)
        for number in range(reader.num_record_batches):
            batch = reader.get_batch(number)
            documents: list[Any] = batch["document"].to_pylist()
            labels: list[Any] = batch["label"].to_pylist()
            ids, id_ends = _flat(batch["input_ids"])
            targets, target_ends = _flat(batch["targets"])
            for row, (document, label) in enumerate(zip(documents, labels, strict=True)):
                yield Window(
                    document,
                    ids[id_ends[row] : id_ends[row + 1]],
                    targets[target_ends[row] : target_ends[row + 1]],
                    label,
                )


def _flat(column: Any) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return a copy of a list column's values, and the offsets of each list."""
    offsets = column.offsets.to_numpy()
    return np.array(column.values.to_numpy()), np.array(offsets)


class _Shards:
    """Writes rows to shards of limited size, and their index."""

    def __init__(self, folder: Path, side: Side, schema: pa.Schema) -> None:
        self.folder, self.side, self.schema = folder, side, schema
        self.names: list[str] = []
        self.rows = self.tokens = self.targets = 0
        self._pending: list[list[Window]] = []
        self._pending_tokens = self._row_in_shard = self._shard_bytes = 0
        self._shard: pa.RecordBatchFileWriter | None = None
        self._index_name = f"{side}/index.arrow"
        self._index = pa.ipc.new_file(str(folder / self._index_name), INDEX)

    def add(self, sequence: list[Window]) -> None:
        self._pending.append(sequence)
        self._pending_tokens += sum(map(len, sequence))
        if len(self._pending) == BATCH_ROWS or self._pending_tokens >= BATCH_TOKENS:
            self._flush()

    def close(self, documents: int) -> SideRecord:
        """Finish writing and return the record of this side."""
        self._flush()
        if self._shard is not None:
            self._shard.close()
        self._index.close()
        return SideRecord(
            shards=self.names,
            index=self._index_name,
            rows=self.rows,
            documents=documents,
            tokens=self.tokens,
            target_tokens=self.targets,
        )

    def _flush(self) -> None:
        if not self._pending:
            return
        if self._shard is None or self._shard_bytes >= SHARD_BYTES:
            self._next_shard()
        assert self._shard is not None
        packed = self.schema == PACKED
        batch = _packed_batch(self._pending) if packed else _class_batch(self._pending)
        write_batch(self._shard, batch)
        self._shard_bytes += batch.nbytes
        self._write_index(packed)
        self._pending, self._pending_tokens = [], 0

    def _next_shard(self) -> None:
        if self._shard is not None:
            self._shard.close()
        name = f"{self.side}/shard-{len(self.names):05}.arrow"
        self.names.append(name)
        self._shard = pa.ipc.new_file(str(self.folder / name), self.schema)
        self._row_in_shard = self._shard_bytes = 0

    def _write_index(self, packed: bool) -> None:
        tokens = [sum(map(len, sequence)) for sequence in self._pending]
        # A record to classify is one target.
        targets = [
            sum(int(window.targets.sum()) for window in sequence) if packed else 1
            for sequence in self._pending
        ]
        count = len(self._pending)
        self._index.write_batch(
            pa.RecordBatch.from_arrays(
                [
                    pa.array([len(self.names) - 1] * count, pa.int32()),
                    pa.array(range(self._row_in_shard, self._row_in_shard + count), pa.int32()),
                    pa.array(tokens, pa.int32()),
                    pa.array(targets, pa.int32()),
                    pa.array(
                        [[window.document for window in one] for one in self._pending],
                        pa.list_(pa.string()),
                    ),
                ],
                schema=INDEX,
            )
        )
        self._row_in_shard += count
        self.rows += count
        self.tokens += sum(tokens)
        self.targets += sum(targets)


def _packed_batch(sequences: list[list[Window]]) -> pa.RecordBatch:
    lengths = [[len(window) for window in one] for one in sequences]
    ends = np.cumsum([0, *map(sum, lengths)], dtype=np.int32)
    flat = [window for one in sequences for window in one]
    ids = np.concatenate([window.input_ids for window in flat])
    targets = np.concatenate([window.targets for window in flat])
    return pa.RecordBatch.from_arrays(
        [
            _lists(ends, ids),
            _lists(ends, targets),
            pa.array(lengths, pa.list_(pa.int32())),
        ],
        schema=PACKED,
    )


def _lists(ends: Any, values: Any) -> pa.Array[Any]:
    """Return an Arrow list column, without creating Python lists."""
    return pa.ListArray.from_arrays(ends, values)


def _class_batch(sequences: list[list[Window]]) -> pa.RecordBatch:
    flat = [window for one in sequences for window in one]
    return pa.RecordBatch.from_arrays(
        [
            pa.array([window.input_ids for window in flat], pa.list_(pa.int32())),
            pa.array([window.label for window in flat], pa.int32()),
        ],
        schema=CLASSES,
    )
