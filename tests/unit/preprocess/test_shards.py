"""Rows of any schema are stored in order, in record batches of limited size."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from steadytrain.components.preprocess import shards
from steadytrain.components.preprocess.prepare import DOCUMENT, TARGETS, TOKENS
from steadytrain.components.preprocess.shards import write_rows
from steadytrain.components.shared.arrow_files import open_batches

from support.data import read_table

SCHEMA = pa.schema({"name": pa.string(), "values": pa.list_(pa.float32())})


def write_part(path: Path, first: int, tokens: list[int]) -> Path:
    """Write a part in record batches of two rows."""
    columns = {DOCUMENT: pa.string(), TOKENS: pa.int32(), TARGETS: pa.int32()}
    schema = pa.schema([*pa.schema(columns), *SCHEMA])
    rows = [
        {
            DOCUMENT: f"document {number}",
            TOKENS: count,
            TARGETS: 1,
            "name": f"row {number}",
            "values": [float(number)] * count,
        }
        for number, count in enumerate(tokens, first)
    ]
    with pa.ipc.new_file(str(path), schema) as out:
        for start in range(0, len(rows), 2):
            out.write_batch(pa.RecordBatch.from_pylist(rows[start : start + 2], schema))
    return path


@pytest.mark.parametrize(
    ("rows", "tokens", "sizes"), [(3, 100, [3, 3, 1]), (100, 9, [3, 1, 3]), (2, 5, [2, 1, 1, 2, 1])]
)
def test_rows_keep_their_order_in_batches_of_limited_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: int, tokens: int, sizes: list[int]
) -> None:
    monkeypatch.setattr(shards, "BATCH_ROWS", rows)
    monkeypatch.setattr(shards, "BATCH_TOKENS", tokens)
    first, second = [2, 2, 5, 9], [1, 2, 3]
    parts = [write_part(tmp_path / "a", 0, first), write_part(tmp_path / "b", 4, second)]

    record = write_rows("train", parts, tmp_path / "data", schema=SCHEMA, documents=7)

    assert (record.rows, record.tokens, record.target_tokens) == (7, 24, 7)
    (name,) = record.shards
    stored = [batch.checked() for batch in open_batches(tmp_path / "data" / name)]
    assert [batch.num_rows for batch in stored] == sizes
    table = pa.Table.from_batches(stored)
    assert table.schema == SCHEMA
    assert table["name"].to_pylist() == [f"row {number}" for number in range(7)]
    assert list(map(len, table["values"].to_pylist())) == [*first, *second]
    index = read_table(tmp_path / "data" / record.index)
    assert index["row"].to_pylist() == list(range(7))
    assert index["documents"].to_pylist() == [[f"document {number}"] for number in range(7)]
