"""Columnar files that are damaged or that need far more memory than their size suggests."""

from __future__ import annotations

import random
from decimal import Decimal
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from steadytrain.components.preprocess.chunks import Table
from steadytrain.components.preprocess.formats import read_files, wanted
from steadytrain.components.preprocess.inputs import read_dataset
from steadytrain.components.preprocess.parallel import IsolatedProcess
from steadytrain.components.preprocess.sources import find_files
from steadytrain.components.preprocess.tables import COLUMNAR, tables
from steadytrain.components.shared.config import DataConfig
from steadytrain.components.shared.errors import DataError
from steadytrain.components.tasks.encoding.fields import Defect, name_of, number_of
from steadytrain.components.train.loop.data import Rows

from support.apart import counting, crash


def read(path: Path) -> list[Any]:
    data = DataConfig(source=[str(path)])
    files = wanted(find_files(str(path), []), str(path), data)
    return [row for chunk in read_files(files, data, path.parent) for *_, row in chunk.rows()]


def write_offset_outside(path: Path, make: Any) -> None:
    """Write two texts, where the last one ends a gigabyte after its buffer."""
    batch = pa.record_batch({"text": ["good", "bad"]})
    with make(str(path), batch.schema) as out:
        out.write_batch(batch)
    good, bad = (np.array([0, 4, end], dtype=np.int32).tobytes() for end in (7, 1 << 30))
    content = path.read_bytes()
    assert content.count(good) == 1
    path.write_bytes(content.replace(good, bad))


@pytest.mark.parametrize(
    "make", [pa.ipc.new_file, pytest.param(pa.ipc.new_stream, marks=pytest.mark.slow)]
)
def test_offset_outside_its_buffer_is_rejected(tmp_path: Path, make: Any) -> None:
    write_offset_outside(tmp_path / "x.arrow", make)
    with pytest.raises(DataError, match=r"x\.arrow: the file cannot be read"):
        read(tmp_path / "x.arrow")


def test_saved_data_set_with_an_offset_outside_its_buffer_is_rejected(tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    datasets.Dataset.from_dict({"text": ["a", "b"]}).save_to_disk(saved)
    write_offset_outside(saved / "data-00000-of-00001.arrow", pa.ipc.new_stream)
    with pytest.raises(DataError, match="cannot be read"):
        list(read_dataset(str(saved)))


def test_trainer_refuses_a_damaged_shard(tmp_path: Path) -> None:
    write_offset_outside(tmp_path / "shard.arrow", pa.ipc.new_file)
    rows = Rows([tmp_path / "shard.arrow"])
    with pytest.raises(DataError, match=r"shard\.arrow is not a complete Arrow file"):
        rows[1]
    content = (tmp_path / "shard.arrow").read_bytes()
    for size in (0, 5, len(content) // 2, len(content) - 1):
        (tmp_path / "shard.arrow").write_bytes(content[:size])
        with pytest.raises(DataError, match=r"shard\.arrow is not a complete Arrow file"):
            Rows([tmp_path / "shard.arrow"])


def fuzzed(folder: Path, count: int) -> list[Path]:
    """Write files with some bits flipped."""
    generator = random.Random(3)
    table = pa.table(
        {
            "text": [f"record {number} " * (number % 7) for number in range(300)],
            "label": pa.array([str(number % 3) for number in range(300)]).dictionary_encode(),
            "messages": [[{"role": "user", "content": "hi"}] * (n % 4) for n in range(300)],
        }
    )
    paths = []
    for number in range(count):
        path = folder / f"{number}.{'parquet' if number % 4 == 3 else 'arrow'}"
        if number % 4 == 3:
            pq.write_table(table, path, row_group_size=100)
        else:
            make = pa.ipc.new_stream if number % 4 == 1 else pa.ipc.new_file
            options = pa.ipc.IpcWriteOptions(compression="zstd" if number % 4 == 2 else None)
            with make(str(path), table.schema, options=options) as out:
                out.write_table(table, max_chunksize=100)
        content = bytearray(path.read_bytes())
        for _ in range(generator.choice([1, 1, 2, 8])):
            content[generator.randrange(len(content))] ^= 1 << generator.randrange(8)
        path.write_bytes(content)
        paths.append(path)
    return paths


@pytest.mark.slow
def test_flipped_bits_give_rows_or_an_error(tmp_path: Path) -> None:
    """The point of these 300 files is that this process survives them."""
    outcomes = {"rows": 0, "refused": 0}
    with IsolatedProcess() as isolated:
        for path in fuzzed(tmp_path, 300):
            reader = COLUMNAR[path.suffix.removeprefix(".")]
            try:
                for chunk in isolated.iterate(path.name, reader, path.name, path):
                    list(chunk.rows())
                outcomes["rows"] += 1
            except DataError:
                outcomes["refused"] += 1
    assert min(outcomes.values()) > 10, outcomes


@pytest.mark.long
def test_small_file_with_large_values_takes_little_memory(tmp_path: Path) -> None:
    """The file has 469 bytes and holds a gigabyte of text."""
    table = pa.table({"text": ["a" * 1_000_000] * 1024})
    pq.write_table(table, tmp_path / "x.parquet", compression="zstd")
    del table
    assert (tmp_path / "x.parquet").stat().st_size < 1000
    with IsolatedProcess(512 << 20) as isolated:
        rows = 0
        for chunk in isolated.iterate("x", COLUMNAR["parquet"], "x", tmp_path / "x.parquet"):
            rows += 1
            assert isinstance(chunk, Table)
            assert chunk.batch.nbytes < 2 << 20
    assert rows == 1024


@pytest.mark.slow
def test_oversized_value_is_rejected(tmp_path: Path) -> None:
    table = pa.table({"text": ["a" * (200 << 20)]})
    pq.write_table(table, tmp_path / "x.parquet", compression="zstd")
    with (
        IsolatedProcess(100 << 20) as isolated,
        pytest.raises(DataError, match="takes more than 105 MB"),
    ):
        list(isolated.iterate("x", COLUMNAR["parquet"], "x", tmp_path / "x.parquet"))
    (row,) = read(tmp_path / "x.parquet")
    assert isinstance(row, Defect)


def test_reader_that_crashes_is_an_error_and_the_next_file_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    with IsolatedProcess() as isolated:
        with pytest.raises(DataError, match="ended with SIGSEGV"):
            list(isolated.iterate("x", crash))
        assert list(isolated.iterate("x", counting, 3)) == [0, 1, 2]


def test_values_without_a_python_type_are_defects_of_rows_that_need_them() -> None:
    when = pa.array([0, 2**62], pa.timestamp("s"))
    batch = pa.record_batch({"text": ["a", "b"], "when": when})
    (chunk,) = tables("x", [batch])
    first, second = (row for *_, row in chunk.rows())
    assert not isinstance(first, Defect)
    assert not isinstance(second, Defect)
    assert list(second) == ["text", "when"]
    assert second["text"] == second.get("text") == "b"
    for read in (second.get, second.__getitem__):
        with pytest.raises(Defect, match="when is a value that Python does not have"):
            read("when")


def test_dictionary_is_not_copied_for_every_row() -> None:
    names = pa.array([f"{number} " * 2000 for number in range(300)]).dictionary_encode()
    found = list(tables("x", [pa.record_batch({"text": names})]))
    assert sum(chunk.batch.nbytes for chunk in found if isinstance(chunk, Table)) < 4 << 20


@pytest.mark.slow
@pytest.mark.parametrize("suffix", ["arrow", "parquet"])
def test_columns_of_any_type_of_text_and_list_are_read(tmp_path: Path, suffix: str) -> None:
    texts, path = ["one", None, "three"], tmp_path / f"x.{suffix}"
    columns = {
        "view": pa.array(texts, pa.string_view()),
        "large": pa.array(texts, pa.large_string()),
        "dictionary": pa.array(texts).dictionary_encode(),
        "bytes": pa.array([text and text.encode() for text in texts], pa.binary_view()),
        "list": pa.array([[text] for text in texts], pa.large_list(pa.string())),
        "number": pa.array([Decimal(3), None, Decimal("2.5")], pa.decimal128(38, 2)),
    }
    table = pa.table(columns)
    if suffix == "arrow":
        with pa.ipc.new_file(str(path), table.schema) as out:
            out.write_table(table)
    else:
        pq.write_table(table, path)
    assert read(path) == table.to_pylist()
    found = [number_of(row, "number") for row in read(path) if row["number"]]
    assert found == [3.0, 2.5]
    assert name_of(read(path)[0], "number") == "3"
    with pytest.raises(Defect, match="number is Decimal, not text or a whole number"):
        name_of(read(path)[2], "number")
