"""Bits of prepared data change on disk: no step uses them, and the next run restores them."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from steadytrain.components.evaluate.scoring import judged_records
from steadytrain.components.preprocess.step import run
from steadytrain.components.shared.arrow_files import open_batches, write_batch
from steadytrain.components.shared.errors import DataError
from steadytrain.components.shared.records import DataRecord
from steadytrain.components.tasks.scoring.table import read_batches
from steadytrain.components.train.loop.data import Rows

from support.data import texts, write_jsonl

FLIPS = 60


def trained(config: Any, data: DataRecord) -> list[Any]:
    rows = Rows([data.path(name) for name in data.sides["train"].shards])
    return [{name: list(value) for name, value in row.items()} for row in rows]


def counted(config: Any, data: DataRecord) -> list[Any]:
    return [batch.to_pydict() for batch in read_batches(data, "train", ["input_ids"])]


def evaluated(config: Any, data: DataRecord) -> list[Any]:
    return judged_records(config, data).to_pylist()


@pytest.mark.parametrize(
    ("use", "file"),
    [
        (trained, "train/shard-00000.arrow"),
        (counted, "train/shard-00000.arrow"),
        (evaluated, "test-records.arrow"),
    ],
)
def test_flipped_bit_is_never_used(
    tmp_path: Path, configure: Any, use: Callable[..., list[Any]], file: str
) -> None:
    config = configure(write_jsonl(tmp_path / "x.jsonl", texts(150)))
    data = run(config)
    whole, path = use(config, data), data.path(file)
    content = path.read_bytes()
    draw, refused = random.Random(5), 0
    for _ in range(FLIPS):
        place = draw.randrange(len(content))
        damaged = bytearray(content)
        damaged[place] ^= 1 << draw.randrange(8)
        # Write a new file, so that the mapped memory of the old one doesn't change.
        path.unlink()
        path.write_bytes(damaged)
        try:
            found = use(config, data)
        except DataError as error:
            found, refused = whole, refused + (str(path) in error.message)
        assert found == whole, f"byte {place}"
    # The other flips hit unused bytes: padding between buffers.
    assert refused > FLIPS / 2
    assert use(config, run(config)) == whole


def test_sliced_batches_are_checked(tmp_path: Path) -> None:
    """Test slices, nulls, and a null bitmap without nulls."""
    whole = pa.RecordBatch.from_pydict(
        {
            "text": pa.array(["a", None, "bcd", "", None, "e"]),
            "lists": pa.array([[1], None, [], [2, None, 3], [4], [5, 6]], pa.list_(pa.int32())),
            "flags": pa.array([True, False, None, True, True, False]),
            "records": pa.array([[{"role": "user"}]] * 6),
        }
    )
    parts = [whole, whole.slice(1, 3), whole.slice(5), whole.slice(2, 0), whole.take([0, 3])]
    with pa.ipc.new_file(str(tmp_path / "x.arrow"), whole.schema) as writer:
        for part in parts:
            write_batch(writer, part)
    found = open_batches(tmp_path / "x.arrow")
    assert all(stored.digest for stored in found)
    assert [stored.checked() for stored in found] == parts
