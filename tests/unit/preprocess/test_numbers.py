"""Texts with a number to predict: what is a number, and what becomes of several for one text."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pyarrow as pa
import pytest

from steadytrain.components.memory.model import label_count
from steadytrain.components.preprocess.data_card import show
from steadytrain.components.preprocess.step import run
from steadytrain.components.shared.config import DataConfig, from_mapping
from steadytrain.components.shared.config.data_sections import Columns
from steadytrain.components.shared.errors import BadInput, ConfigError, DataError
from steadytrain.components.tasks.base import open_encoder
from steadytrain.components.tasks.checks import check_task
from steadytrain.components.tasks.encoding.fields import Defect
from steadytrain.pipelines.sources import find_task, open_source

from support.data import quarantined, sentence, side_rows, write_jsonl

TASK = "sequence_regression"
ENCODER = open_encoder(DataConfig(source=["x"], task=TASK, columns=Columns(label="price")))


@pytest.mark.parametrize(
    ("value", "number"),
    [(3, 3.0), (-0.5, -0.5), ("3.5", 3.5), (" 1e3", 1000.0), ("3", 3.0), (0, 0.0)],
)
def test_a_number_may_be_text_as_in_csv_files(value, number):
    assert float(ENCODER.read({"text": "a", "price": value}).label) == number


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        *((value, "wrong_type") for value in (True, "high", "", "1_000", "nan", [1], 1e31)),
        *((value, "wrong_type") for value in (float("nan"), float("inf"), 10**400)),
        (None, "missing_field"),
    ],
)
def test_anything_else_is_a_defect_with_its_field(value, reason):
    with pytest.raises(Defect, match="price is ") as caught:
        ENCODER.read({"text": "a", "price": value})
    assert caught.value.reason == reason


def test_pairs_have_their_types_and_numbers():
    columns = Columns(text="a", text_pair="b")
    encoder = open_encoder(DataConfig(source=["x"], task=TASK, columns=columns))
    assert set(encoder.schema.names) == {"input_ids", "label", "token_type_ids"}
    content = encoder.read({"a": "one", "b": "two", "label": "3.5"})
    stored = pa.table({"content": [content.text], "label": [content.label]})
    found = encoder.test_columns(stored)
    assert (found["text_pair"].to_pylist(), found["label"].to_pylist()) == (["two"], [3.5])
    assert encoder.columns() == [["a", "b", "label"]]


def rows(count=80):
    return [{"text": sentence(n), "label": 10 + n / 4} for n in range(count)]


def test_numbers_reach_rows_records_and_the_card(tmp_path, configure):
    twice = [{"text": sentence(n), "label": value} for n in range(5) for value in (90, 91, 91)]
    config = configure(
        write_jsonl(tmp_path / "a.jsonl", [*rows(), *twice, {"text": "x", "label": "y"}]),
        task=TASK,
        max_bad_share=0.1,
        near_duplicate_threshold=None,
    )
    record = run(config)
    reasons = [entry["reason"] for entry in quarantined(record)]
    assert sorted(reasons) == ["exact_duplicate"] * 5 + ["wrong_type"]
    card = json.loads(record.path("card.json").read_text())
    found = {side: [row["label"] for row in side_rows(record, side)] for side in card["sides"]}
    # Each number of a text is used, and all of them are on one side.
    assert sorted(itertools.chain(*found.values())) == sorted(
        [row["label"] for row in rows()] + [90.0, 91.0] * 5
    )
    assert all(numbers.count(90.0) == numbers.count(91.0) for numbers in found.values())
    for side, numbers in found.items():
        told = card["sides"][side]["numbers"]
        assert card["sides"][side]["labels"] == {}
        assert told["mean"] == pytest.approx(np.mean(numbers))
        assert told["5 %"] == pytest.approx(np.quantile(numbers, 0.05))
        assert (told["min"], told["max"]) == (min(numbers), max(numbers))
    assert "Numbers to predict" in record.path("card.html").read_text()
    assert show(config, 1)[0].label == "10.0"
    # Numbers from 10 to 30 have at most 21 first two digits, so that their drift is seen.
    buckets = np.count_nonzero(np.sum(record.profile.labels, axis=0))
    assert 10 < buckets <= 22


def test_equal_numbers_stop_before_training(tmp_path, configure):
    same = [{**row, "label": 3} for row in rows()]
    config = configure(write_jsonl(tmp_path / "a.jsonl", same), task=TASK)
    with pytest.raises(DataError, match="has the number 3 in 'label', so that there is nothing"):
        run(config)


def labeled(value):
    return [{"text": sentence(n), **value(n)} for n in range(80)]


FOUND = {
    "fractions": (lambda n: {"label": n / 4}, TASK, ""),
    "numbers as text": (lambda n: {"label": str(n / 4)}, TASK, ""),
    "few whole numbers": (lambda n: {"label": n % 5}, "sequence_classification", "5 different"),
    "many whole numbers": (
        lambda n: {"label": n % 30},
        "sequence_classification",
        "30 different whole numbers: if they are measured or counted",
    ),
    "whole numbers with a point": (
        lambda n: {"label": f"{n % 30}.0"},
        "sequence_classification",
        "30 different whole numbers",
    ),
    "a score beside classes": (
        lambda n: {"label": "ab"[n % 2], "score": n / 4},
        "sequence_classification",
        "",
    ),
    "whole numbers beside a text": (lambda n: {"value": n}, "causal_lm", ""),
}


@pytest.mark.parametrize("case", FOUND)
def test_data_with_numbers_find_their_task(tmp_path, case):
    value, task, reason = FOUND[case]
    path = str(write_jsonl(tmp_path / "a.jsonl", labeled(value)))
    found = find_task(path, [])
    assert found[0] == task
    assert reason in found[1]
    assert open_source(path, []).config.data.task == task


@pytest.mark.parametrize(
    ("value", "message", "choices"),
    [
        (
            lambda n: {"rating": n / 4},
            "60 of the first 80 records have a fraction in 'rating'",
            ("data.columns.label=rating", "data.task=causal_lm"),
        ),
        (
            lambda n: {"label": n},
            "suit sequence_classification and sequence_regression and causal_lm",
            (f"data.task={TASK}",),
        ),
    ],
)
def test_what_may_be_a_number_to_predict_is_asked(tmp_path, value, message, choices):
    path = str(write_jsonl(tmp_path / "a.jsonl", labeled(value)))
    with pytest.raises(BadInput, match=message) as caught:
        find_task(path, [])
    assert all(f"--set {choice}" in caught.value.remedy for choice in choices)


def test_classes_that_count_get_a_warning(tmp_path, configure):
    path = write_jsonl(tmp_path / "a.jsonl", labeled(lambda n: {"label": n % 30}))
    record = run(configure(path, task="sequence_classification"))
    card = json.loads(record.path("card.json").read_text())
    assert any("use data.task sequence_regression" in warning for warning in card["warnings"])


REFUSED = {
    "data.labels": {"data": {"labels": ["1", "2"]}},
    "training.label_smoothing_factor": {"training": {"label_smoothing_factor": 0.1}},
    "training.class_weights": {"training": {"class_weights": {"kind": "balanced"}}},
    "training.mixup": {"training": {"mixup": {"alpha": 0.4}}},
    "training.focal_loss": {"training": {"focal_loss": {"gamma": 2.0}}},
    "training.r_drop": {"training": {"r_drop": {"weight": 1.0}}},
    "training.distillation": {"training": {"distillation": {"teacher": "hub:a"}}},
    "training.batch_contrastive": {"training": {"batch_contrastive": {"rows": 4}}},
    "training.contrastive": {"training": {"contrastive": {"weight": 0.5}}},
    "training.order": {"training": {"order": "balanced"}},
    "training.curriculum.by": {"training": {"curriculum": {"by": "sequence_length"}}},
    "data.long_records": {"data": {"long_records": "drop"}},
    "data.train_on": {"data": {"train_on": "all"}},
    "data.group_by_prompt": {"data": {"group_by_prompt": False}},
    "data.chat_template": {"data": {"chat_template": "{{ messages }}"}},
    "gate.metric": {"gate": {"metric": "accuracy"}},
    "training.metric_for_best_model": {"training": {"metric_for_best_model": "macro_f1"}},
    "evaluation.tasks": {"evaluation": {"tasks": ["a"]}},
    "model.config.problem_type": {"model": {"config": {"problem_type": "single_label"}}},
}


@pytest.mark.parametrize("field", REFUSED)
def test_settings_without_effect_on_numbers_are_refused(field):
    given = REFUSED[field]
    content = {
        "name": "tiny",
        "data": {"source": ["x"], "task": TASK, **given.get("data", {})},
        "model": {"config": {"model_type": "bert", **given.get("model", {}).get("config", {})}},
        **{name: value for name, value in given.items() if name not in ("data", "model")},
    }
    with pytest.raises(ConfigError) as caught:
        check_task(from_mapping(content))
    assert field in {problem.field for problem in caught.value.problems}


@pytest.mark.parametrize(
    "given",
    [
        {"training": {"metric_for_best_model": "r2"}, "gate": {"metric": "mae"}},
        {"training": {"adversarial": {"kind": "fgm"}}, "gate": {"floors": {"spearman": 0.4}}},
        {"training": {"augmentation": {"swap": 0.1}}, "evaluation": {"character_noise": 0.1}},
        {"training": {"curriculum": {"by": "length"}}},
    ],
)
def test_settings_that_work_for_numbers_are_accepted(given):
    data, model = {"source": ["x"], "task": TASK}, {"config": {"model_type": "bert"}}
    config = from_mapping({"name": "tiny", "data": data, "model": model, **given})
    check_task(config)
    assert label_count(config) == 1
