"""Pack windows of documents into sequences.

This uses best fit (Ding et al., "Fewer Truncations Improve Language Modeling", 2024) with a limited
number of open sequences: a window goes to the sequence with the least free space that still fits
it. The result depends only on the order of the windows, which is the order of content hashes.
"""

from __future__ import annotations

import bisect
import collections
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Protocol, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from steadytrain.components.preprocess.prepare import DOCUMENT, SOURCE, TARGETS, TOKENS
from steadytrain.components.shared.arrow_files import write_batch
from steadytrain.components.shared.records import SideRecord, SourceRecord

OPEN_SEQUENCES: Final = 256
SHORTEST_WINDOW: Final = 2


class Sized(Protocol):
    """Anything with a length in tokens."""

    def __len__(self) -> int:
        """Return the number of tokens."""


W = TypeVar("W", bound=Sized)


def best_fit(windows: Iterable[W], capacity: int) -> Iterator[list[W]]:
    """Yield sequences of windows with at most `capacity` tokens in total.

    Every window is in exactly one sequence. At most OPEN_SEQUENCES sequences are in memory.
    """
    by_room: dict[int, collections.deque[list[W]]] = {}
    rooms: list[int] = []
    count = 0
    for window in windows:
        index = bisect.bisect_left(rooms, len(window))
        room, sequence = capacity, []
        if index < len(rooms):
            room, sequence = rooms[index], _take(by_room, rooms, index)
            count -= 1
        sequence.append(window)
        room -= len(window)
        if room < SHORTEST_WINDOW:
            yield sequence
            continue
        if room not in by_room:
            bisect.insort(rooms, room)
            by_room[room] = collections.deque()
        by_room[room].append(sequence)
        count += 1
        if count > OPEN_SEQUENCES:
            yield _take(by_room, rooms, 0)
            count -= 1
    while rooms:
        yield _take(by_room, rooms, 0)


def _take(by_room: dict[int, collections.deque[list[W]]], rooms: list[int], index: int) -> list[W]:
    """Remove and return the oldest sequence with the free space at a position of `rooms`."""
    room = rooms[index]
    sequence = by_room[room].popleft()
    if not by_room[room]:
        del by_room[room], rooms[index]
    return sequence


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
class _Batch:
    """Rows of a shard, and for each its tokens, its number of targets, and its content hashes."""

    rows: pa.RecordBatch
    tokens: NDArray[Any]
    targets: NDArray[Any]
    documents: list[list[str]]


def write_packed(
    side: str,
    parts: Sequence[Path],
    folder: Path,
    *,
    capacity: int,
    documents: int,
    sources: Mapping[str, int] = MappingProxyType({}),
) -> SideRecord:
    """Pack windows into sequences, and write them as `write_rows` does.

    Args:
        capacity: tokens per sequence.
        sources: the documents of each data set of a mixture. A sequence has windows of one of them
            only, and the sequences of one follow those of the one before.
    """
    result: list[SourceRecord] = []
    (folder / side).mkdir(parents=True)
    output = _Shards(folder, side, PACKED)
    for name, count in sources.items() or ((None, documents),):
        rows, tokens = output.rows, output.tokens
        windows = (window for part in parts for window in _windows(part, name))
        for batch in _sequences(best_fit(windows, capacity)):
            output.add(batch)
        if name is not None:
            own = output.rows - rows, count, output.tokens - tokens
            result.append(SourceRecord(name=name, rows=own[0], documents=own[1], tokens=own[2]))
    return output.close(documents).model_copy(update={"sources": result})


def write_rows(
    side: str, parts: Sequence[Path], folder: Path, *, schema: pa.Schema, documents: int
) -> SideRecord:
    """Write <side>/shard-00000.arrow and so on, and <side>/index.arrow.

    Args:
        side: a side of the split, or a part of one.
        parts: files of rows, in the order of content hashes.
        folder: the data folder.
        schema: columns of the rows.
        documents: number of records on this side.
    """
    (folder / side).mkdir(parents=True)
    output = _Shards(folder, side, schema)
    for batch in _rows(parts, schema):
        output.add(batch)
    return output.close(documents)


def _rows(parts: Sequence[Path], schema: pa.Schema) -> Iterator[_Batch]:
    """Yield the rows of all parts, BATCH_ROWS at a time, or as soon as they have BATCH_TOKENS."""
    pending: pa.Table | None = None
    for table in _tables(parts):
        pending = table if pending is None else pa.concat_tables([pending, table])
        start = 0
        for stop in _cuts(pending[TOKENS].to_numpy()):
            yield _row_batch(pending.slice(start, stop - start), schema)
            start = stop
        # A copy, so that the memory of the rows before it can be freed.
        pending = pending.slice(start).combine_chunks()
    if pending is not None and pending.num_rows:
        yield _row_batch(pending, schema)


def _tables(parts: Sequence[Path]) -> Iterator[pa.Table]:
    for part in parts:
        with pa.memory_map(str(part)) as source:
            reader = pa.ipc.open_file(source)
            for number in range(reader.num_record_batches):
                yield pa.Table.from_batches([reader.get_batch(number)])


def _cuts(tokens: NDArray[Any]) -> Iterator[int]:
    """Yield where each complete batch ends."""
    totals, start = np.cumsum(tokens, dtype=np.int64), 0
    while True:
        before = int(totals[start - 1]) if start else 0
        full = int(np.searchsorted(totals, before + BATCH_TOKENS)) + 1
        stop = min(start + BATCH_ROWS, max(full, start + 1))
        if stop > len(tokens):
            return
        yield stop
        start = stop


def _row_batch(table: pa.Table, schema: pa.Schema) -> _Batch:
    # A copy, so that equal rows are stored as equal bytes, wherever they were cut out.
    whole = table.take(pa.array(range(table.num_rows), pa.int64())).combine_chunks()
    (rows,) = whole.select(schema.names).to_batches()
    documents: list[Any] = whole[DOCUMENT].to_pylist()
    return _Batch(
        rows,
        whole[TOKENS].to_numpy(),
        whole[TARGETS].to_numpy(),
        [[document] for document in documents],
    )


@dataclass(frozen=True)
class _Window:
    """A window of a document, to be packed."""

    document: str
    input_ids: NDArray[np.int32]
    targets: NDArray[np.int8]

    def __len__(self) -> int:
        return len(self.input_ids)


def _windows(part: Path, source: str | None) -> Iterator[_Window]:
    """Yield the windows of a part's file; of one data set alone if `source` names it."""
    for table in _tables([part]):
        if source is not None:
            table = table.filter(pc.equal(table[SOURCE], pa.scalar(source))).combine_chunks()
            if not table.num_rows:
                continue
        (batch,) = table.to_batches()
        documents: list[Any] = batch[DOCUMENT].to_pylist()
        ids, id_ends = _flat(batch["input_ids"])
        targets, target_ends = _flat(batch["targets"])
        for row, document in enumerate(documents):
            yield _Window(
                document,
                ids[id_ends[row] : id_ends[row + 1]],
                targets[target_ends[row] : target_ends[row + 1]],
            )


def _flat(column: Any) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return a copy of a list column's values, and the offsets of each list."""
    offsets = column.offsets.to_numpy()
    return np.array(column.values.to_numpy()), np.array(offsets)


def _sequences(sequences: Iterator[list[_Window]]) -> Iterator[_Batch]:
    pending: list[list[_Window]] = []
    tokens = 0
    for sequence in sequences:
        pending.append(sequence)
        tokens += sum(map(len, sequence))
        if len(pending) == BATCH_ROWS or tokens >= BATCH_TOKENS:
            yield _packed_batch(pending)
            pending, tokens = [], 0
    if pending:
        yield _packed_batch(pending)


def _packed_batch(sequences: list[list[_Window]]) -> _Batch:
    lengths = [[len(window) for window in one] for one in sequences]
    tokens = list(map(sum, lengths))
    ends = np.cumsum([0, *tokens], dtype=np.int32)
    flat = [window for one in sequences for window in one]
    ids = np.concatenate([window.input_ids for window in flat])
    targets = np.concatenate([window.targets for window in flat])
    rows = pa.RecordBatch.from_arrays(
        [
            _lists(ends, ids),
            _lists(ends, targets),
            pa.array(lengths, pa.list_(pa.int32())),
        ],
        schema=PACKED,
    )
    return _Batch(
        rows,
        np.array(tokens),
        np.array([sum(int(window.targets.sum()) for window in one) for one in sequences]),
        [[window.document for window in one] for one in sequences],
    )


def _lists(ends: Any, values: Any) -> pa.Array[Any]:
    """Return an Arrow list column, without creating Python lists."""
    return pa.ListArray.from_arrays(ends, values)


class _Shards:
    """Writes rows to shards of limited size, and their index."""

    def __init__(self, folder: Path, side: str, schema: pa.Schema) -> None:
        self.folder, self.side, self.schema = folder, side, schema
        self.names: list[str] = []
        self.rows = self.tokens = self.targets = 0
        self._row_in_shard = self._shard_bytes = 0
        self._shard: pa.RecordBatchFileWriter | None = None
        self._index_name = f"{side}/index.arrow"
        self._index = pa.ipc.new_file(str(folder / self._index_name), INDEX)

    def add(self, batch: _Batch) -> None:
        if self._shard is None or self._shard_bytes >= SHARD_BYTES:
            self._next_shard()
        assert self._shard is not None
        write_batch(self._shard, batch.rows)
        self._shard_bytes += batch.rows.nbytes
        self._write_index(batch)

    def close(self, documents: int) -> SideRecord:
        """Finish writing and return the record of this side."""
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

    def _next_shard(self) -> None:
        if self._shard is not None:
            self._shard.close()
        name = f"{self.side}/shard-{len(self.names):05}.arrow"
        self.names.append(name)
        self._shard = pa.ipc.new_file(str(self.folder / name), self.schema)
        self._row_in_shard = self._shard_bytes = 0

    def _write_index(self, batch: _Batch) -> None:
        count = batch.rows.num_rows
        self._index.write_batch(
            pa.RecordBatch.from_arrays(
                [
                    pa.array([len(self.names) - 1] * count, pa.int32()),
                    pa.array(range(self._row_in_shard, self._row_in_shard + count), pa.int32()),
                    pa.array(batch.tokens, pa.int32()),
                    pa.array(batch.targets, pa.int32()),
                    pa.array(batch.documents, pa.list_(pa.string())),
                ],
                schema=INDEX,
            )
        )
        self._row_in_shard += count
        self.rows += count
        self.tokens += int(batch.tokens.sum())
        self.targets += int(batch.targets.sum())
