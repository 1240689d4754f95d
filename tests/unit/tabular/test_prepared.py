"""Tables through preprocessing: what is kept, what is split, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from steadytrain.components.preprocess.step import run as preprocess
from steadytrain.components.shared import plugins
from steadytrain.components.shared.config import load
from steadytrain.components.shared.errors import ConfigError, DataError
from steadytrain.components.tabular.encoder import ClassTableEncoder, NumberTableEncoder
from steadytrain.components.tabular.learners import read_side, read_table
from steadytrain.components.tabular.model import is_missing
from steadytrain.components.tabular.tasks import FRAMEWORKS
from steadytrain.components.tasks.checks import check_task
from steadytrain.components.tasks.encoding.fields import Defect

from support.tables import LINEAR, REGRESSION, prepared, table_config, write_csv


def test_equal_records_are_all_kept_and_on_one_side(tmp_path):
    records = [
        {"a": f"v{row % 40}", "b": row % 5, "target": ("no", "yes")[row // 40 % 2]}
        for row in range(400)
    ]
    _, data = prepared(tmp_path, records)
    sides = {
        side: [json.dumps(record, sort_keys=True) for record in read_side(data, side)[0]]
        for side in ("train", "validation")
    }
    test = 400 - sum(map(len, sides.values()))
    assert data.sides["test"].documents == test > 0
    assert not {*sides["train"]} & {*sides["validation"]}
    assert len(sides["train"]) > len({*sides["train"]})


def test_columns_and_their_reasons_are_stored_and_in_the_card(tmp_path):
    records = [
        {"id": f"r{row}", "copy": row % 2, "size": (row * 7) % 31, "target": row % 2}
        for row in range(300)
    ]
    _, data = prepared(tmp_path, records)
    table = read_table(data)
    assert table.features == {"size": "number"}
    card = json.loads(data.path("card.json").read_text())
    assert {item["name"] for item in card["columns"]} == {"id", "copy", "size"}
    page = data.path("card.html").read_text()
    assert "not learned from: every value is different" in page
    text = " ".join(card["warnings"])
    assert "'id' is not learned from: every value is different" in text
    assert "'copy' is not learned from: its numbers separate the 2 classes" in text


def test_card_draws_how_numbers_are_distributed_and_counts_categories(tmp_path):
    records = [
        {"size": (row * 7) % 31, "color": f"c{row % 7}", "target": row % 2} for row in range(300)
    ]
    _, data = prepared(tmp_path, records)
    page = data.path("card.html").read_text()
    (color, size) = json.loads(data.path("card.json").read_text())["columns"]
    assert len(color["examples"]) == 7
    assert ", ".join(color["examples"]) in page
    counts = ", ".join(map(str, size["histogram"]))
    assert f'aria-label="numbers in equal parts from 0 to 30: {counts}"' in page
    assert "; ".join(f"{value:.0f}" for value in size["quantiles"]) in page
    assert sum(size["histogram"]) == data.sides["train"].documents


def test_card_of_a_wide_table_says_how_many_columns_are_not_shown(tmp_path):
    names = [f"c{place:03}" for place in range(203)]
    records = [
        {name: (row * 7 + place) % 31 for place, name in enumerate(names)} | {"target": row % 2}
        for row in range(60)
    ]
    _, data = prepared(tmp_path, records)
    page = data.path("card.html").read_text()
    assert "Columns (the first 200 of 203; 3 are not shown)" in page
    assert page.count("numbers in equal parts from") == 200


def test_leak_is_learned_from_if_it_is_allowed(tmp_path):
    records = [{"copy": row % 2, "size": (row * 7) % 31, "target": row % 2} for row in range(300)]
    _, data = prepared(tmp_path, records, "data.allow_leaks=[copy]")
    assert read_table(data).features == {"copy": "number", "size": "number"}


@pytest.mark.parametrize(
    ("numbers", "refusal"),
    [
        ((3, 3), r"has the number 3 in 'target'"),
        ((1, 1e308), r"'target' reach from 1 to 1e\+308 on the \w+ side, and their squares"),
    ],
)
def test_numbers_that_nothing_can_learn_are_refused_by_the_field_of_their_column(
    tmp_path, numbers, refusal
):
    records = [{"size": row, "target": numbers[row % 2]} for row in range(40)]
    with pytest.raises(DataError, match=refusal) as refused:
        prepared(tmp_path, records, REGRESSION)
    assert "check data.target" in refused.value.remedy


def test_values_of_another_kind_on_a_held_out_side_are_counted(tmp_path):
    tests = tmp_path / "test"
    tests.mkdir()
    held = write_csv(tests, [{"x": ("odd", 3)[row % 2], "target": row % 2} for row in range(20)])
    records = [{"x": row % 31, "target": row % 2} for row in range(300)]
    _, data = prepared(tmp_path, records, f"data.test_source=[{held}]")
    (warning,) = [
        text for text in json.loads(data.path("card.json").read_text())["warnings"] if "'x'" in text
    ]
    assert "test side has" in warning
    assert "not a number, such as 'odd'; they count as missing" in warning


def test_values_of_another_kind_are_counted_once_for_a_side_in_several_parts():
    encoder = ClassTableEncoder(table_config(Path("table.csv")).data)

    def rows(values):
        texts = [json.dumps({"x": value}) for value in values]
        return pa.table({"features": texts, "label": [row % 2 for row in range(len(texts))]})

    sides = {"train": [rows(range(30))], "validation": [], "test": [rows(["a", 1]), rows(["b"])]}
    (remark,) = encoder.describe(sides).remarks()
    assert "the test side has 2 values" in remark


def repeated(folder, *overrides):
    """Prepare 100 records three times, each time with another number; return the warnings, too."""
    chance = np.random.default_rng(0)
    values, target = chance.integers(1000, size=100), chance.integers(2, size=100)
    records = [
        {"serial": f"r{row:04}", "x": int(values[row % 100]), "target": int(target[row % 100])}
        for row in range(300)
    ]
    folder.mkdir()
    _, data = prepared(folder, records, *overrides)
    said = json.loads(data.path("card.json").read_text())["warnings"]
    sides = [{*map(keyed, *read_side(data, side))} for side in ("train", "validation")]
    return sides, [keyed(*pair) for pair in zip(*read_side(data, "validation"), strict=True)], said


def keyed(record, target):
    return record["x"], int(target)


def test_records_that_differ_only_in_what_is_not_learned_are_counted_on_held_out_sides(tmp_path):
    (train, _), held_out, said = repeated(tmp_path / "all")
    count = sum(one in train for one in held_out)
    assert count > 0.8 * len(held_out)
    (validation,) = [it for it in said if "records of the validation side equal one" in it]
    assert validation.startswith(f"{count} records of the validation side")
    assert "they differ in others, such as 'serial'" in validation
    assert len([it for it in said if "records of the test side equal one" in it]) == 1
    (train, validation), _, said = repeated(tmp_path / "named", "data.features=[x]")
    assert not train & validation
    assert not [it for it in said if "equal one of the training side" in it]


def test_named_features_are_the_only_ones(tmp_path):
    records = [{"a": row % 7, "b": row % 5, "target": row % 2} for row in range(300)]
    _, data = prepared(tmp_path, records, "data.features=[b]")
    assert {*read_side(data, "train")[0][0]} == {"b"}


def test_target_with_spaces_and_a_group(tmp_path):
    records = [{"x": row % 7, "who": f"p{row // 3}", "sale price": row * 1.5} for row in range(300)]
    source = write_csv(tmp_path, records)
    overrides = [REGRESSION, "data.columns.group=who"]
    config = table_config(source, *overrides, target="sale price")
    data = preprocess(config)
    assert {*read_side(data, "train")[0][0]} == {"x"}


@pytest.mark.parametrize(
    ("records", "overrides", "message"),
    [
        ([{"x": row, "target": "a"} for row in range(100)], [], "1 different labels"),
        ([{"x": row % 3, "y": row % 2} for row in range(100)], [], "'target'"),
        (
            [{"x": f"id{row}", "target": row % 2} for row in range(100)],
            [],
            "no column can be learned from",
        ),
        (
            [{"x": row % 3, "target": row % 2} for row in range(100)],
            ["data.allow_leaks=[z]"],
            "data.allow_leaks names 'z'",
        ),
        (
            [{"x": row % 3, "target": row % 2} for row in range(100)],
            ["data.categories=[z]"],
            "data.categories names 'z'",
        ),
        (
            [{"x": row % 3, "target": row % 2} for row in range(100)],
            ["data.categories=[target]"],
            "data.categories names 'target', which is no column to learn from",
        ),
        ([{"x": row, "target": 1.5} for row in range(100)], [REGRESSION], "nothing to learn"),
        (
            [{"x": row % 3, "target": ("", 1)[row % 2]} for row in range(100)],
            [],
            "defective",
        ),
    ],
)
def test_table_that_teaches_nothing_is_refused(tmp_path, records, overrides, message):
    with pytest.raises(DataError, match=message):
        prepared(tmp_path, records, *overrides)


@pytest.mark.parametrize(
    ("overrides", "message", "remedy"),
    [
        (
            ["data.features=[Agee, x]"],
            "no record has the column 'Agee' (data.features); the existing columns are age, target",
            "write 'age' instead of 'Agee' in data.features, or name one of these columns in "
            "data.features, or leave it out of data.features",
        ),
        (
            ["data.features=[age, zzz]"],
            "no record has the column 'zzz' (data.features)",
            "name one of these columns in data.features, or leave it out of data.features",
        ),
        (
            ["data.target=targett"],
            "no record has the column 'targett' (data.target)",
            "write 'target' instead of 'targett' in data.target, or name one of these columns in "
            "data.target",
        ),
    ],
)
def test_fix_for_a_column_that_the_data_do_not_have_names_field_and_nearest_column(
    tmp_path, overrides, message, remedy
):
    records = [{"age": row % 7, "x": row % 5, "target": row % 2} for row in range(100)]
    with pytest.raises(DataError) as caught:
        prepared(tmp_path, records, *overrides)
    assert message in caught.value.message
    assert caught.value.remedy.partition(";")[0] == remedy


def test_fix_for_a_table_with_another_delimiter_names_it(tmp_path):
    path = tmp_path / "table.csv"
    path.write_text("age;target\n" + "".join(f"{row};{row % 2}\n" for row in range(9)))
    given = {"data.source": [str(path)], "data.csv": {"delimiter": "|"}, "output": str(tmp_path)}
    with pytest.raises(DataError, match="the existing columns are age;target") as caught:
        preprocess(load("tabular", {**given, "data.target": "target"}))
    assert caught.value.remedy.startswith("set data.csv.delimiter to ';', or name one of")


def test_target_is_required():
    with pytest.raises(ConfigError, match=r"data\.target"):
        load("tabular", ["data.target=null"])


@pytest.mark.parametrize(
    ("overrides", "field"),
    [
        (["model.framework=pytorch"], "model.framework"),
        (["data.features=[target]"], "data.features"),
        (["data.features=[a, w]", "data.columns.weight=w"], "data.features"),
        (["training.global_batch_size=8"], "training.global_batch_size"),
        (["training.weight_decay=0.1"], "training.weight_decay"),
        (["training.bf16=true"], "training.bf16"),
        (["data.columns.label=price"], "data.columns.label"),
        (["data.sequence_length=64"], "data.sequence_length"),
        (["model.vocab_size=500"], "model.vocab_size"),
        (
            ["compute.device=cuda"],
            r"compute\.device = cuda: model\.framework lightgbm learns tables",
        ),
        ([REGRESSION, "data.labels=[a, b]"], "data.labels"),
    ],
)
def test_setting_that_does_not_go_with_a_table_is_refused(tmp_path, overrides, field):
    with pytest.raises(ConfigError, match=field):
        check_task(table_config(tmp_path / "table.csv", *overrides))


@pytest.mark.parametrize("framework", sorted(FRAMEWORKS))
def test_gpu_that_no_learner_of_tables_uses_is_refused(tmp_path, framework, monkeypatch):
    chosen = f"model.framework={framework}"
    config = table_config(tmp_path / "table.csv", chosen, "compute.device=cuda")
    with pytest.raises(ConfigError, match=f"compute.device.*{framework} learns tables on the CPU"):
        check_task(config)
    started = []

    def launch(config, *_):
        started.append(config.compute.device)
        raise ConnectionError("enough")

    monkeypatch.setattr("steadytrain.components.train.framework.launcher_for", launch)
    auto = table_config(tmp_path / "table.csv", chosen)
    check_task(auto)
    with pytest.raises(ConnectionError):
        plugins.load(plugins.TRAINERS, framework)(auto, None, on_validation=None, sinks=[])
    assert started == ["cpu"]


def test_gpu_of_a_learner_of_another_package_is_its_own_matter(tmp_path, monkeypatch):
    monkeypatch.setattr("steadytrain.components.tasks.checks.is_ours", lambda *_: False)
    check_task(table_config(tmp_path / "table.csv", "compute.device=cuda"))


def test_tables_frameworks_train_no_text():
    config = load("causal-lm", [*LINEAR])
    with pytest.raises(ConfigError, match=r"does not train data\.task causal_lm"):
        check_task(config)
    with pytest.raises(ConfigError, match=r"data\.target"):
        load("causal-lm", ["data.target=price"])


def test_class_that_a_frame_turned_into_a_fraction_is_a_class(tmp_path):
    path = tmp_path / "table.parquet"
    records = [
        {"x": row % 7, "target": None if row % 50 == 0 else float(row % 2)} for row in range(300)
    ]
    pd.DataFrame(records).to_parquet(path)
    data = preprocess(table_config(path))
    assert data.labels == ["0", "1"]
    card = json.loads(data.path("card.json").read_text())
    assert card["quarantine"] == {"missing_field": 6}


WAYS = (None, "", " ", "?", "NA", "n/a", "NaN", "null", "None")


def test_class_that_is_written_as_missing_is_a_defect(tmp_path):
    frame = pd.DataFrame({"x": [row % 7 for row in range(300)]})
    frame["target"] = [
        WAYS[row // 10 % 9] if row % 10 == 0 else ("no", "yes")[row % 2] for row in range(300)
    ]
    path = tmp_path / "table.csv"
    frame.to_csv(path, index=False)
    data = preprocess(table_config(path, "data.max_bad_share=0.5"))
    assert data.labels == ["no", "yes"]
    card = json.loads(data.path("card.json").read_text())
    assert sum(card["quarantine"].values()) == 30
    assert {*card["quarantine"]} <= {"missing_field", "empty_field"}
    quarantine = data.path("quarantine.jsonl").read_text()
    assert "target is '?', which counts as missing" in quarantine


@pytest.mark.parametrize("value", WAYS)
def test_missing_target_is_that_of_a_missing_value(value):
    assert is_missing(value)
    for encoder, settings in ((ClassTableEncoder, []), (NumberTableEncoder, [REGRESSION])):
        reader = encoder(table_config(Path("table.csv"), *settings).data)
        with pytest.raises(Defect, match="target"):
            reader.read({"x": 1, "target": value})


def test_class_that_is_named_like_a_missing_value_is_one():
    config = table_config(Path("table.csv"), "data.labels=['none', 'some']")
    assert ClassTableEncoder(config.data).read({"x": 1, "target": "none"}).label == "none"
    with pytest.raises(Defect, match="'NONE', which counts as missing"):
        ClassTableEncoder(config.data).read({"x": 1, "target": "NONE"})
