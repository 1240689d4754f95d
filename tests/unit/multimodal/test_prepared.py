"""Tables with texts and images through preprocessing: kinds, defects, duplicates and refusals."""

from __future__ import annotations

import csv
import json
from collections import Counter
from pathlib import Path

import pytest
from PIL import Image

from steadytrain.components.multimodal.encoder import (
    MultimodalEncoder,
    pixels_by_column,
    read_schema,
)
from steadytrain.components.predict.model import Input, ServedModel
from steadytrain.components.preprocess.inputs import find_inputs
from steadytrain.components.preprocess.step import run as preprocess
from steadytrain.components.shared.config import load
from steadytrain.components.shared.errors import ConfigError, DataError
from steadytrain.components.tasks.checks import check_task
from steadytrain.components.tasks.encoding.fields import Defect
from steadytrain.components.tasks.encoding.tokens import load_tokenizer
from steadytrain.components.train.loop.data import Rows
from steadytrain.pipelines.model_commands import _data_to_read

from support.mixed import add_backs, mixed_config, write_mixed
from support.pictures import noise, written


def quarantine(data):
    lines = data.path("quarantine.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_kinds_of_columns_are_inferred_and_stored(prepared_mixed):
    table, data = prepared_mixed
    schema = read_schema(data)
    assert schema.table.features == {
        "color": "category",
        "height": "number",
        "note": "text",
        "picture": "image",
        "seen": "date",
        "weight": "number",
    }
    assert (schema.pictures, schema.texts) == (["picture"], ["note"])
    assert schema.images.sizes == {"28 x 28": data.sides["train"].documents}
    card = json.loads(data.path("card.json").read_text())
    assert {one["name"]: one["kind"] for one in card["columns"]} == schema.table.features
    assert len(table.read_text().splitlines()) == 401


@pytest.mark.slow
def test_records_whose_texts_are_cut_are_counted(table):
    data = preprocess(mixed_config(table, "data.sequence_length=9"))
    tokenizer = load_tokenizer(data.path(data.tokenizer))
    with table.open(encoding="utf-8") as handle:
        notes = [row["note"] for row in csv.DictReader(handle) if row["note"]]
    long = sum(len(tokenizer(note)["input_ids"]) > 9 for note in notes)
    card = json.loads(data.path("card.json").read_text())
    assert 0 < long < len(notes)
    assert sum(side["truncated"] for side in card["sides"].values()) == long


@pytest.fixture
def table(tmp_path):
    return write_mixed(tmp_path / "data", 120)


def add(table, *lines):
    with table.open("a", encoding="utf-8") as handle:
        handle.writelines(f"{line}\n" for line in lines)


def test_broken_and_absent_images_are_quarantined_and_a_gap_is_none(table):
    (table.parent / "broken.png").write_bytes(b"no image")
    add(
        table,
        "broken.png,a b c d e,1,90,red,2024-01-01,0wa",
        "absent.png,a b c d e,1,90,red,2024-01-02,0wa",
        ",a b c d e,1,90,red,2024-01-03,0wa",
    )
    found = [(one["line"], one["reason"]) for one in quarantine(preprocess(mixed_config(table)))]
    assert sorted(found) == [(122, "broken_image"), (123, "missing_file")]
    add(
        table,
        "a\0.png,a b c d e,1,90,red,2024-01-04,0wa",
        ",is this the same as 001.png,1,90,red,2024-01-05,0wa",
    )
    data = preprocess(mixed_config(table, "data.columns.image=picture"))
    found = [(one["line"], one["reason"]) for one in quarantine(data)]
    assert sorted(found) == [(122, "broken_image"), (123, "missing_file"), (125, "missing_file")]
    assert sum(side.documents for side in data.sides.values()) == 122


def test_equal_records_are_one_and_a_different_class_is_a_conflict(table):
    lines = table.read_text().splitlines()[1:]
    kinds = ("0wa", "1cb")
    other = next(kind for kind in kinds if not lines[1].endswith(kind))
    add(table, lines[0], f"{lines[1].rpartition(',')[0]},{other}")
    found = sorted(one["reason"] for one in quarantine(preprocess(mixed_config(table))))
    assert found == ["conflicting_label", "conflicting_label", "exact_duplicate"]


def test_same_text_with_another_image_is_no_near_duplicate(table):
    header, *lines = table.read_text().splitlines()
    note = "the quick brown fox jumps over the lazy dog and then sleeps for a week"
    parts = [line.split(",") for line in lines]
    changed = [",".join([one[0], note, *one[2:]]) for one in parts]
    table.write_text("\n".join([header, *changed]) + "\n")
    data = preprocess(mixed_config(table, "data.columns.text=note"))
    assert quarantine(data) == []


@pytest.mark.parametrize(
    ("features", "message"),
    [
        ("[note]", "none is a number, category or date"),
        ("[height]", "no column is a text"),
    ],
)
def test_one_kind_alone_is_refused_with_its_own_task(table, features, message):
    with pytest.raises(DataError, match=message) as caught:
        preprocess(mixed_config(table, f"data.features={features}"))
    assert "tabular_classification" in caught.value.remedy


def test_fix_for_a_feature_that_the_table_does_not_have_names_the_nearest(table):
    with pytest.raises(DataError, match=r"has the column 'Hight' \(data\.features\)") as caught:
        preprocess(mixed_config(table, "data.features=[note, Hight]"))
    assert caught.value.remedy.startswith("write 'height' instead of 'Hight' in data.features")


def test_short_text_is_text_where_it_is_named(table):
    data = preprocess(mixed_config(table, "data.columns.text=color"))
    assert read_schema(data).texts == ["color", "note"]


def test_images_in_two_columns_are_kept_apart_and_missing_ones_are_counted_by_column(table):
    rows = add_backs(table)
    config = mixed_config(table)
    data = preprocess(config)
    schema = read_schema(data)
    assert schema.pictures == ["back", "picture"]
    files = {(row["note"], row["height"]): row for row in rows.to_dict("records")}
    train = Rows([data.path(name) for name in data.sides["train"].shards])
    missing = Counter()
    for index in range(len(train)):
        stored = train[index]
        features = json.loads(stored["features"])
        row = files[features["note"], features["height"]]
        ours = pixels_by_column(stored["image_columns"], stored["pixels"])
        assert [*ours] == [name for name in ("back", "picture") if row[name]]
        for name, pixels in ours.items():
            with Image.open(table.parent / row[name]) as file:
                expected = file.convert("L").resize((16, 16), Image.Resampling.BILINEAR)
            assert pixels == expected.tobytes()
        missing.update({"back", "picture"} - {*ours})
    assert set(missing) == {"back", "picture"}
    card = json.loads(data.path("card.json").read_text())
    shares = {one["name"]: one["missing"] for one in card["columns"] if one["kind"] == "image"}
    assert shares == {name: pytest.approx(n / len(train), abs=1e-6) for name, n in missing.items()}
    # A broken one names its record, as in a single column.
    (table.parent / "broken.png").write_bytes(b"no image")
    rows.loc[3, "back"] = "broken.png"
    rows.to_csv(table, index=False)
    found = [(one["line"], one["reason"]) for one in quarantine(preprocess(config))]
    assert found == [(5, "broken_image")]


def test_batch_scoring_reads_the_files_that_all_columns_of_images_name(table, tmp_path):
    rows = add_backs(table).to_dict("records")
    kinds = {"note": "any", "back": "bytes", "picture": "bytes"}
    model = ServedModel(
        "models:/m/1", [Input(n, n, k, False) for n, k in kinds.items()], None, None
    )
    data = _data_to_read([str(table)], model, [])
    read = [row for chunk in find_inputs(data).chunks(data, tmp_path) for *_, row in chunk.rows()]
    assert len(read) == len(rows)
    for found, row in zip(read, rows, strict=True):
        for name in ("back", "picture"):
            content = (table.parent / row[name]).read_bytes() if row[name] else None
            assert model.inputs[[*kinds].index(name)].read(found) == content


def test_several_columns_of_images_are_named_and_a_text_may_end_like_a_file(table, tmp_path):
    rows = add_backs(table)
    rows.loc[3, "note"] = "is this the same as 001.png"
    rows.loc[4, "back"] = "absent.png"
    rows.to_csv(table, index=False)
    found = [one["line"] for one in quarantine(preprocess(mixed_config(table)))]
    assert found == [5, 6]
    listed = mixed_config(table, "data.columns.image=[picture, back]")
    data = preprocess(listed)
    assert [(one["line"], one["reason"]) for one in quarantine(data)] == [(6, "missing_file")]
    assert read_schema(data).pictures == ["back", "picture"]
    with pytest.raises(DataError, match=r"no record has .*front.*data\.columns\.image"):
        preprocess(mixed_config(table, "data.columns.image=[picture, front]"))
    # Batch prediction reads the same files.
    kinds = {"note": "any", "back": "bytes", "picture": "bytes"}
    inputs = [Input(name, name, kind, False) for name, kind in kinds.items()]
    model = ServedModel("models:/m/1", inputs, listed, None)
    asked = _data_to_read([str(table)], model, [])
    read = [row for chunk in find_inputs(asked).chunks(asked, tmp_path) for *_, row in chunk.rows()]
    assert read[3]["note"] == "is this the same as 001.png"
    assert isinstance(read[4], Defect)
    assert isinstance(read[3]["picture"], bytes)


@pytest.mark.parametrize(
    ("preset", "value", "message"),
    [
        ("images", "[front, back]", "image_classification learns from one image of a record"),
        ("multimodal", "[front, front]", "'front' is listed twice"),
        ("multimodal", "[]", "at least 1 item"),
        ("multimodal", "[front, '']", "a column has no name"),
    ],
)
def test_list_of_images_that_cannot_work_is_refused(preset, value, message):
    with pytest.raises(ConfigError, match=message) as caught:
        load(preset, [f"data.columns.image={value}", "data.source=[x.csv]", "data.target=kind"][:2])
    assert "data.columns.image" in str(caught.value)


def test_class_that_is_written_as_missing_is_a_defect_as_in_a_table():
    data = mixed_config(Path("data/x.csv")).data
    row = {"note": "a text", data.target: "?"}
    with pytest.raises(Defect, match="'\\?', which counts as missing"):
        MultimodalEncoder(data).read(row)
    named = data.model_copy(update={"labels": ["?", "other"]})
    assert MultimodalEncoder(named).read(row).label == "?"


def test_image_beside_the_column_that_is_named_is_refused():
    encoder = MultimodalEncoder(mixed_config(Path("data/x.csv"), "data.columns.image=one").data)
    row = {"kind": "a", "one": written(noise(1)[0]), "two": written(noise(1)[0])}
    with pytest.raises(Defect, match=r"two holds an image, and data\.columns\.image names one"):
        encoder.read(row)
    with pytest.raises(Defect, match="no such file"):
        MultimodalEncoder(mixed_config(Path("data/x.csv")).data).read(
            {"kind": "a", "one": "photos/1.PNG"}
        )


@pytest.mark.parametrize(
    ("override", "field"),
    [
        ("model.fusion.image.depthz=3", r"model\.fusion\.image\.depthz"),
        ("model.adapter.kind=lora", r"model\.adapter"),
        ("training.image_augmentation.shift=0.1", r"training\.image_augmentation"),
    ],
)
def test_setting_that_does_not_go_with_it_is_refused(override, field):
    with pytest.raises(ConfigError, match=field):
        check_task(mixed_config(Path("data/x.csv"), override))


def test_fusion_is_for_this_task_alone():
    for preset in ("causal-lm", "images", "tabular"):
        with pytest.raises(ConfigError, match=r"model\.fusion"):
            check_task(load(preset, ["model.fusion.width=64"]))
    with pytest.raises(ConfigError, match="no model_type"):
        load("multimodal", ["model.fusion.image={depths: [1]}"])
