"""Delimited files: what is detected, and how reading continues after a damaged row."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from steadytrain.components.preprocess.formats import read_files, wanted
from steadytrain.components.preprocess.sources import find_files
from steadytrain.components.preprocess.step import run
from steadytrain.components.shared.config import DataConfig
from steadytrain.components.shared.config.data_sections import CsvConfig
from steadytrain.components.tasks.encoding.fields import Defect


def read(address: Path, **settings: Any) -> tuple[list[dict[str, Any]], list[tuple[int, str]]]:
    """Return the rows of a file, and its defects with their lines."""
    data = DataConfig(source=[str(address)], csv=CsvConfig(**settings))
    files = wanted(find_files(str(address), []), str(address), data)
    rows, defects = [], []
    for chunk in read_files(files, data, address.parent):
        for _, line, row in chunk.rows():
            if isinstance(row, Defect):
                defects.append((line, row.detail))
            else:
                rows.append(dict(row))
    return rows, defects


def lines(count: int = 400) -> list[str]:
    return [f"{number},text number {number},{number % 3}" for number in range(count)]


@pytest.mark.parametrize("closing", ["", '"', '",'])
def test_stray_quote_costs_its_own_row(tmp_path: Path, closing: str) -> None:
    """The quote is not closed, or another one far away closes it."""
    content = lines()
    content[100] = '100,"text number 100,1'
    if closing:
        content[379] = f"379,text number 379{closing or ''},1".replace(",,", ",")
    (tmp_path / "x.csv").write_text("\n".join(["id,text,label", *content]) + "\n")
    rows, defects = read(tmp_path / "x.csv")
    assert [row["id"] for row in rows] == [str(n) for n in range(400) if n != 100]
    ((line, detail),) = defects
    assert line == 102
    assert "the quote that opens in line 102 does not close before line" in detail
    assert "reading continues in line 103" in detail


def test_text_of_several_lines_stays_one_row(tmp_path: Path) -> None:
    texts = [
        "one\ntwo\nthree",
        "a, b\nc, d",
        'quoted "so",\nand\r\nso',
        "\n".join(map(str, range(99))),
        # Each line has the delimiters of a row.
        "\n".join(f"{number},{number}" for number in range(99)),
        "\n".join(f"x{number},y" for number in range(12)) + "\n",
    ]
    with (tmp_path / "x.csv").open("w", newline="") as handle:
        writer = csv.writer(handle)
        writer.writerows([["text", "label"], *([text, "a"] for text in texts)])
    rows, defects = read(tmp_path / "x.csv")
    assert [row["text"] for row in rows] == texts
    assert not defects


def test_row_of_several_lines_with_too_many_fields_is_one_defect(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text('text,label\n"one\ntwo",a,b\n"x",c\n')
    rows, defects = read(tmp_path / "x.csv")
    assert rows == [{"text": "x", "label": "c"}]
    assert defects == [(2, "3 fields in lines 2 to 3 where the header names 2")]


@pytest.mark.parametrize("mark", [",", ";", "\t", "|"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32"])
@pytest.mark.parametrize("suffix", [".csv", ".tsv"])
def test_delimiter_and_utf_16_are_detected(
    tmp_path: Path, mark: str, encoding: str, suffix: str
) -> None:
    path = tmp_path / f"x{suffix}"
    with path.open("w", newline="", encoding=encoding) as handle:
        writer = csv.writer(handle, delimiter=mark)
        writer.writerows([["text", "a label"], ["é, one; two|three\tfour", "x"]])
    assert read(path) == ([{"text": "é, one; two|three\tfour", "a label": "x"}], [])


@pytest.mark.parametrize(
    ("content", "row"),
    [
        ("\n \n\ntext;label\na, b;c\n", {"text": "a, b", "label": "c"}),
        (";;\ntext;label;x\na, b;c;\n", {"text": "a, b", "label": "c", "x": ""}),
        ('text, label\n"a, b", c\n', {"text": "a, b", "label": "c"}),
        (' text ,label \na,"b, c"\n', {"text": "a", "label": "b, c"}),
        ("text,label\rone,a\r", {"text": "one", "label": "a"}),
    ],
)
def test_header_is_found_below_blank_lines_and_between_spaces(
    tmp_path: Path, content: str, row: dict[str, str]
) -> None:
    (tmp_path / "x.csv").write_bytes(content.encode())
    assert read(tmp_path / "x.csv") == ([row], [])


def test_a_header_again_is_a_defect(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("text,label\none,a\ntext,label\ntwo,b\n")
    rows, defects = read(tmp_path / "x.csv")
    assert [row["text"] for row in rows] == ["one", "two"]
    assert defects == [(3, "it is the header again, as in files that were joined")]


def test_settings_override_what_would_be_detected(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_bytes("text,label\nl'\xe9t\xe9 \\' et l\\'hiver,a'\n".encode("latin-1"))
    expected = [{"text": "l'\xe9t\xe9 ' et l'hiver", "label": "a'"}]
    assert read(path, encoding="latin-1", quotechar="", escapechar="\\") == (expected, [])
    path.write_text("text;with|label\na;b|c\n")
    assert read(path, delimiter="|")[0] == [{"text;with": "a;b", "label": "c"}]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"delimiter": '"'}, "give each its own character"),
        ({"delimiter": "\n"}, "line end"),
        ({"delimiter": "ab"}, "at most 1 character"),
        ({"encoding": "utf-99"}, "not the name of a text encoding"),
        ({"encoding": "hex"}, "not the name of a text encoding"),
    ],
)
def test_impossible_settings_are_rejected(settings: dict[str, str], message: str) -> None:
    with pytest.raises(ValidationError) as error:
        CsvConfig(**settings)
    assert message in str(error.value) + str(error.value.errors()[0].get("ctx", ""))


def test_what_was_detected_is_reported(tmp_path: Path, configure: Any) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    for name in ("a.csv", "b.csv"):
        rows = "".join(f"text {number} of {name};x\n" for number in range(60))
        (folder / name).write_text(f"text;label\n{rows}")
    record = run(configure(folder))
    card = json.loads(record.path("card.json").read_text())
    assert card["detected"] == {"the delimiter ';'": 2}
