from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from steadytrain.components.preprocess import formats
from steadytrain.components.preprocess.chunks import Lines
from steadytrain.components.preprocess.formats import HIDDEN, UNREAD, read_files, wanted
from steadytrain.components.preprocess.inputs import find_inputs
from steadytrain.components.preprocess.sources import EXCLUDED, find_files
from steadytrain.components.shared.config import DataConfig
from steadytrain.components.shared.errors import BadInput, DataError
from steadytrain.components.tasks.encoding.fields import Defect

ROWS = [
    {"text": f'record {number}, quoted "so"\nand é 字', "label": str(number)}
    for number in range(50)
]
TEXT = (".jsonl", ".json", ".csv")


def read(address: Path, **options: Any) -> list[tuple[int, Any]]:
    """Return the line number and row of every record at an address, or the reason of a defect."""
    data = DataConfig(source=[str(address)], **options)
    files = wanted(find_files(str(address), []), str(address), data)
    return [
        (line, row.reason if isinstance(row, Defect) else dict(row))
        for chunk in read_files(files, data, Path("/tmp"))
        for _, line, row in chunk.rows()
    ]


def content_of(name: str, rows: list[dict[str, str]], folder: Path) -> bytes:
    """Return the rows in the format of a file suffix."""
    path = folder / f"plain{name}"
    table = pa.Table.from_pylist(rows)
    if name == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif name == ".json":
        path.write_text(json.dumps(rows, indent=1))
    elif name == ".csv":
        with path.open("w", newline="") as handle:
            writer = csv.DictWriter(handle, ["text", "label"])
            writer.writeheader()
            writer.writerows(rows)
    elif name == ".parquet":
        pq.write_table(table, path, row_group_size=7)
    else:
        with pa.ipc.new_file(str(path), table.schema) as out:
            out.write_table(table)
    return path.read_bytes()


# Each columnar file starts a process; one of them shows that it is decompressed first.
NOT_SLOW = {(".parquet", ""), (".parquet", ".gz"), (".arrow", "")}


@pytest.mark.parametrize(
    ("name", "compression"),
    [
        pytest.param(
            name,
            compression,
            marks=() if name in TEXT or (name, compression) in NOT_SLOW else pytest.mark.slow,
        )
        for name in (*TEXT, ".parquet", ".arrow")
        for compression in ("", ".gz", ".zst")
    ],
)
def test_each_format_plain_and_compressed(tmp_path: Path, name: str, compression: str) -> None:
    content = content_of(name, ROWS, tmp_path)
    if compression == ".gz":
        content = gzip.compress(content)
    if compression == ".zst":
        # Two frames, as parallel compressors write them.
        half = len(content) // 2
        content = b"".join(map(zstandard.compress, (content[:half], content[half:])))
    path = tmp_path / f"data{name}{compression}"
    path.write_bytes(content)
    assert [row for _, row in read(path)] == ROWS


def test_arrow_stream_is_read(tmp_path: Path) -> None:
    table = pa.Table.from_pylist(ROWS)
    with pa.ipc.new_stream(str(tmp_path / "x.arrow"), table.schema) as out:
        out.write_table(table)
    assert [row for _, row in read(tmp_path / "x.arrow")] == ROWS


@pytest.mark.parametrize("chunk", [5, 64, 1 << 20])
def test_chunks_end_at_record_boundaries(
    tmp_path: Path, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(formats, "CHUNK_BYTES", chunk)
    for name in TEXT if chunk > 5 else (*TEXT, ".parquet"):
        path = tmp_path / f"data{name}"
        path.write_bytes(content_of(name, ROWS, tmp_path))
        found = read(path)
        assert [row for _, row in found] == ROWS
        if name != ".csv":
            assert [line for line, _ in found] == list(range(1, 51))


def test_text_has_one_record_per_line(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_bytes("\ufeffone é\r\n\n  \ntwo\n\xff".encode() + b"\n\xff\nend")
    assert read(tmp_path / "x.txt") == [
        (1, {"text": "one é"}),
        (4, {"text": "two"}),
        (5, {"text": "\xff"}),
        (6, "bad_encoding"),
        (7, {"text": "end"}),
    ]


@pytest.mark.parametrize("chunk", [3, 1 << 20])
def test_carriage_returns_alone_end_lines(
    tmp_path: Path, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(formats, "CHUNK_BYTES", chunk)
    (tmp_path / "x.txt").write_bytes(b"a\rb\r\rc\r")
    assert read(tmp_path / "x.txt") == [
        (n, {"text": text}) for n, text in ((1, "a"), (2, "b"), (4, "c"))
    ]
    (tmp_path / "y.txt").write_bytes(b"a\n10 %\r20 %\n")
    assert read(tmp_path / "y.txt")[1] == (2, {"text": "10 %\r20 %"})


def test_concatenated_json_values_are_read(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text('{"text": "a"}\n{"text": "b"} 5')
    assert read(tmp_path / "x.json") == [(1, {"text": "a"}), (2, {"text": "b"}), (3, "wrong_type")]


def test_truncated_json_names_the_record(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text('[{"text": "a"}, {"text": ')
    with pytest.raises(DataError, match="not JSON after record 1"):
        read(tmp_path / "x.json")


@pytest.mark.parametrize("chunk", [3, 1 << 20])
@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ('[["a", 1], ["b", 2]]', ["wrong_type"] * 2),
        ('["a"]\n["b"]\n', ["wrong_type"] * 2),
        ("[[], [[]], [{}]]", ["wrong_type"] * 3),
        ('[{"text": "a"}]\n[{"text": "b"}]', [{"text": "a"}, {"text": "b"}]),
        ("[]", []),
    ],
)
def test_json_of_another_shape_is_still_json(
    tmp_path: Path, content: str, expected: list[Any], chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(formats, "CHUNK_BYTES", chunk)
    (tmp_path / "x.json").write_text(content)
    assert [row for _, row in read(tmp_path / "x.json")] == expected


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"text": "a"}]', "not JSON after record 1"),
        ('[{"text": "a"}', "the list is not closed after record 1"),
        ("[1, " + "1" * 5000 + "]", "JSON beyond Python's limits after record 1"),
        ('{"data": ["' + "x" * 300 + '"]}', "record 1 does not end within 100 characters"),
    ],
)
def test_json_that_cannot_be_read_is_called_what_it_is(
    tmp_path: Path, content: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "within" in message:
        monkeypatch.setattr(formats, "LINE_LIMIT", 100)
        monkeypatch.setattr(formats, "CHUNK_BYTES", 64)
    (tmp_path / "x.json").write_text(content)
    with pytest.raises(DataError, match=message):
        read(tmp_path / "x.json")


def test_lines_beyond_the_limits_of_python_are_not_called_not_json() -> None:
    content = b'{"n": ' + b"1" * 5000 + b'}\n{"n": \n'
    details = [str(row) for _, _, row in Lines("x", 1, content, plain=False).rows()]
    assert "JSON beyond Python's limits: Exceeds the limit" in details[0]
    assert "not JSON: Expecting value" in details[1]


def test_csv_rows_with_extra_fields_are_defects(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_bytes(b'text,label\na,1\n\nb\n"c"x,2\n\xff,3\n')
    found = read(tmp_path / "x.csv")
    assert [(line, row) for line, row in found if not isinstance(row, Mapping)] == [
        (4, "bad_format"),
        (5, "bad_format"),
    ]
    assert found[0] == (2, {"text": "a", "label": "1"})
    assert found[-1] == (6, {"text": "\udcff", "label": "3"})


@pytest.mark.parametrize("chunk", [16, 1 << 20])
def test_too_long_line_is_skipped(
    tmp_path: Path, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(formats, "LINE_LIMIT", 100)
    monkeypatch.setattr(formats, "CHUNK_BYTES", chunk)
    lines = ["one", "x" * 300, "three", "y" * 300]
    (tmp_path / "x.txt").write_text("\n".join(lines))
    found = read(tmp_path / "x.txt")
    assert [line for line, _ in found] == [1, 2, 3, 4]
    if chunk == 16:
        assert [row for _, row in found] == [
            {"text": "one"},
            "too_long",
            {"text": "three"},
            "too_long",
        ]


def test_source_tree_is_read(tmp_path: Path) -> None:
    for name, content in (
        ("top.py", b"top"),
        ("pack/mod.py", b"mod"),
        ("pack/big.py", b"x" * 200),
        ("pack/bad.py", b"\xff"),
        ("notes.md", b"no"),
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    found = read(tmp_path, max_record_bytes=100)
    assert found == [
        (1, "bad_encoding"),
        (1, "too_long"),
        (1, {"text": "mod", "path": "pack/mod.py", "package": "pack"}),
        (1, {"text": "top", "path": "top.py", "package": "top"}),
    ]
    markdown = read(tmp_path, suffixes=[".md"])
    assert markdown == [(1, {"text": "no", "path": "notes.md", "package": "notes"})]


def test_stated_format_overrides_the_suffix(tmp_path: Path) -> None:
    (tmp_path / "data.log").write_text('{"text": "a"}\n')
    assert read(tmp_path / "data.log", format="jsonl") == [(1, {"text": "a"})]
    with pytest.raises(BadInput, match=r"data\.format"):
        read(tmp_path / "data.log")


def test_folder_gives_the_files_of_its_format(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "b.csv").write_text("text\nb\n")
    (tmp_path / "c.py").write_text("c")
    assert [row for _, row in read(tmp_path)] == [{"text": "a"}, {"text": "b"}]
    assert [row for _, row in read(tmp_path, format="csv")] == [{"text": "b"}]
    assert [row["text"] for _, row in read(tmp_path, format="source")] == ["c"]
    # A folder of code that holds data too is no silent mixture.
    tree = find_inputs(DataConfig(source=[str(tmp_path)], format="source", exclude=["*.csv"]))
    assert tree.left_out == {UNREAD: 1, EXCLUDED: 1}


def test_suffixes_in_capitals_are_read_and_other_files_are_counted(tmp_path: Path) -> None:
    (tmp_path / "A.CSV").write_text("text\na\n")
    (tmp_path / "b.Csv.GZ").write_bytes(gzip.compress(b"text\nb\n"))
    (tmp_path / "c.xlsx").write_text("c")
    for folder in (".ipynb_checkpoints", "__MACOSX"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "A-checkpoint.csv").write_text("text\nold\n")
    (tmp_path / "..2026").mkdir()
    (tmp_path / "..2026" / "d.csv").write_text("text\nd\n")
    found = find_inputs(DataConfig(source=[str(tmp_path)]))
    assert [row for _, row in read(tmp_path)] == [{"text": "d"}, {"text": "a"}, {"text": "b"}]
    assert read(tmp_path / ".ipynb_checkpoints") == [(2, {"text": "old"})]
    assert found.left_out == {HIDDEN: 2, UNREAD: 1}
    # A glob leaves them out too, unless it asks for them.
    (tmp_path / ".e.csv").write_text("text\ne\n")
    globbed = find_inputs(DataConfig(source=[str(tmp_path / "**/*.csv")]))
    assert [file.path for file, _ in globbed.files] == ["..2026/d.csv"]
    assert globbed.left_out == {HIDDEN: 3}
    assert read(tmp_path / ".*.csv") == [(2, {"text": "e"})]
