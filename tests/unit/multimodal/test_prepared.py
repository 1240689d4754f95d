"""Tables with texts and images through preprocessing: kinds, defects, duplicates and refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from steadytrain.components.multimodal.encoder import MultimodalEncoder, read_schema
from steadytrain.components.preprocess.step import run as preprocess
from steadytrain.components.shared.config import load
from steadytrain.components.shared.errors import ConfigError, DataError
from steadytrain.components.tasks.checks import check_task
from steadytrain.components.tasks.encoding.fields import Defect

from support.mixed import mixed_config, write_mixed
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
    assert (schema.image, schema.texts) == ("picture", ["note"])
    assert schema.images.sizes == {"28 x 28": data.sides["train"].documents}
    card = json.loads(data.path("card.json").read_text())
    assert {one["name"]: one["kind"] for one in card["columns"]} == schema.table.features
    assert len(table.read_text().splitlines()) == 401


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
    data = preprocess(mixed_config(table))
    found = [(one["line"], one["reason"]) for one in quarantine(data)]
    assert sorted(found) == [(122, "broken_image"), (123, "missing_file")]
    assert sum(side.documents for side in data.sides.values()) == 121


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


def test_images_in_two_columns_are_refused():
    encoder = MultimodalEncoder(mixed_config(Path("data/x.csv")).data)
    row = {"kind": "a", "one": written(noise(1)[0]), "two": written(noise(1)[0])}
    with pytest.raises(Defect, match="one and two both hold images"):
        encoder.read(row)
    with pytest.raises(Defect, match="no such file"):
        encoder.read({"kind": "a", "one": "photos/1.PNG"})


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
