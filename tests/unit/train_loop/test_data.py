"""Which rows each step sees."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from steadytrain.components.shared.errors import DataError
from steadytrain.components.train.loop.data import Rows, share

from support.training import CLASSES, PACKED, class_rows, language_rows, write_shard


def test_rows_are_read_by_global_index_over_files_and_batches(tmp_path):
    made = language_rows(30)
    for name, part in (("a", made[:11]), ("b", []), ("c", made[11:])):
        write_shard(tmp_path / name, part, PACKED)

    rows = Rows([tmp_path / name for name in "abc"])

    assert len(rows) == 30
    for index in (0, 6, 7, 10, 11, 29):
        assert {name: list(value) for name, value in rows[index].items()} == made[index]
    assert isinstance(rows[0]["input_ids"], np.ndarray)
    with pytest.raises(IndexError):
        rows[30]


def test_lengths_are_read_without_the_values(tmp_path):
    made = language_rows(30)
    for name, part in (("a", made[:11]), ("b", []), ("c", made[11:])):
        write_shard(tmp_path / name, part, PACKED)

    rows = Rows([tmp_path / name for name in "abc"])

    assert rows.lengths("input_ids").tolist() == [len(row["input_ids"]) for row in made]
    assert not rows._columns


def test_scalars_come_as_python_values(tmp_path):
    write_shard(tmp_path / "a", class_rows(3), CLASSES)

    assert isinstance(Rows([tmp_path / "a"])[0]["label"], int)


def test_non_numeric_lists_are_read(tmp_path):
    schema = pa.schema([("words", pa.list_(pa.string())), ("flags", pa.list_(pa.bool_()))])
    made = {"words": ["a", "b"], "flags": [True, False]}
    write_shard(tmp_path / "a", [made], schema)

    row = Rows([tmp_path / "a"])[0]

    assert {name: list(value) for name, value in row.items()} == made


def test_missing_values_are_none(tmp_path):
    schema = pa.schema([("words", pa.list_(pa.int32())), ("name", pa.large_string())])
    made = [{"words": [1], "name": None}, {"words": None, "name": "é"}, {"words": [], "name": ""}]
    write_shard(tmp_path / "a", made, schema)

    rows = Rows([tmp_path / "a"])

    assert rows[0] == {"words": [1], "name": None}
    assert rows[1] == {"words": None, "name": "é"}
    assert (rows[2]["words"].tolist(), rows[2]["name"]) == ([], "")


@pytest.mark.parametrize("column", ["words", "name"])
@pytest.mark.parametrize("damage", [2**31 - 1, -1, 16])
def test_offsets_damaged_during_use_are_an_error(tmp_path, column, damage):
    """Arrow itself would kill the process, or allocate gigabytes."""
    values = {"words": [[1] * 5] * 3, "name": ["abcde"] * 3}[column]
    kind = {"words": pa.list_(pa.int32()), "name": pa.string()}[column]
    path = tmp_path / "a"
    write_shard(path, [{column: value} for value in values], pa.schema([(column, kind)]))
    rows = Rows([path])
    assert len(rows[0][column]) == 5
    place = path.read_bytes().index(np.array([0, 5, 10, 15], np.int32).tobytes())
    with path.open("r+b") as file:
        file.seek(place + 4)
        file.write(np.int32(damage).tobytes())

    with pytest.raises(IndexError, match=f"{damage}"):
        rows[0]
    with pytest.raises(DataError, match="is not a complete Arrow file"):
        rows.check_used()


@pytest.mark.slow
def test_reading_a_row_imports_no_pandas(tmp_path):
    """Every rank would pay for that import at each start."""
    write_shard(tmp_path / "a", language_rows(1), PACKED)
    program = (
        "import sys\n"
        "from pathlib import Path\n"
        "from steadytrain.components.train.loop.data import Rows\n"
        "assert len(Rows([Path(sys.argv[1])])[0]) == 3\n"
        "assert 'pandas' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path / "a")], check=True)


@pytest.mark.parametrize("content", [b"", b"not Arrow at all"])
def test_torn_shard_is_named(tmp_path, content):
    (tmp_path / "torn.arrow").write_bytes(content)

    with pytest.raises(DataError, match=r"torn\.arrow is not a complete Arrow file"):
        Rows([tmp_path / "torn.arrow"])


def test_missing_shard_is_named(tmp_path):
    with pytest.raises(DataError, match=r"gone\.arrow"):
        Rows([tmp_path / "gone.arrow"])


@given(count=st.integers(0, 40), world=st.integers(1, 9))
def test_ranks_see_the_rows_of_the_batch_once(count, world):
    batch = list(range(count))
    shares = [share(batch, rank, world) for rank in range(world)]

    assert [row for part in shares for row in part] == batch
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
