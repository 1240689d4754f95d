"""Rows and tokens before the data are prepared, against what the preprocess step finds."""

from __future__ import annotations

import json
import random

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from steadytrain.components.plan import sample as sampling
from steadytrain.components.plan.plan import plan_training
from steadytrain.components.plan.sample import sample
from steadytrain.components.preprocess.step import run as preprocess
from steadytrain.components.shared.config import load
from steadytrain.components.shared.errors import DataError, StorageError
from steadytrain.components.shared.quantities import size
from steadytrain.components.sizing.hardware import find_gpu
from steadytrain.components.sizing.length import length_of


def texts(count):
    drawn = random.Random(5)
    words = ["".join(drawn.choices("abcdefgh", k=drawn.randint(2, 9))) for _ in range(900)]
    return [" ".join(drawn.choices(words, k=drawn.randint(5, 90))) for _ in range(count)]


def made(tmp_path, preset, source, **fields):
    given = {"data.source": [str(source)], "output": str(tmp_path / "output"), **fields}
    plain = {"data.format": "auto", "data.columns.slice": None}
    return load(preset, {**plain, "data.near_duplicate_threshold": None, **given})


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["causal-lm", "sequence-classification"])
def test_all_records_of_a_small_data_set_are_counted_exactly(tmp_path, preset):
    path = tmp_path / "texts.jsonl"
    rows = [{"text": text, "label": "ab"[n % 2]} for n, text in enumerate(texts(600))]
    # Copies of a record and a defect do not count.
    path.write_text("\n".join(map(json.dumps, [*rows, *rows[:50], {"text": None}])))
    fields = {"data.columns.text": "text", "data.columns.label": "label"}
    config = made(tmp_path, preset, path, **fields, **{"data.max_bad_share": 0.1})
    found, side = sample(config), preprocess(config).sides["train"]
    assert "counted from all 651 records" in found.source
    assert found.rows == pytest.approx(side.rows, abs=1)
    assert found.documents == side.documents
    assert found.rows * found.tokens == pytest.approx(side.tokens, rel=0.005)


@pytest.mark.slow
def test_large_data_set_is_estimated_from_its_first_records(tmp_path, monkeypatch):
    path = tmp_path / "texts.parquet"
    pq.write_table(pa.table({"text": texts(8000)}), path)
    monkeypatch.setattr(sampling, "_READ_BYTES", path.stat().st_size // 8)
    config = made(tmp_path, "causal-lm", path)
    found, side = sample(config), preprocess(config).sides["train"]
    assert found.source.startswith("an estimate from the first 1,")
    assert found.rows == pytest.approx(side.rows, rel=0.04)
    assert found.documents == pytest.approx(side.documents, rel=0.04)
    assert found.rows * found.tokens == pytest.approx(side.tokens, rel=0.04)


def test_tokenizer_that_is_not_here_is_replaced_by_a_stated_rule(tmp_path):
    path = tmp_path / "texts.jsonl"
    path.write_text("\n".join(json.dumps({"text": text}) for text in texts(300)))
    config = made(tmp_path, "causal-lm", path, **{"model.tokenizer": "hub:nobody/nothing"})
    found = sample(config)
    assert "with 4 characters for a token" in found.source
    characters = sum(map(len, texts(300)))
    assert found.rows * found.tokens == pytest.approx(0.9 * characters / 4, rel=0.1)


def test_length_counts_epochs_and_says_why_nothing_was_counted(tmp_path):
    path = tmp_path / "texts.jsonl"
    path.write_text("\n".join(json.dumps({"text": text}) for text in texts(300)))
    more = {"training.max_steps": -1, "training.num_train_epochs": 3}
    config = made(tmp_path, "causal-lm", path, **more)
    found = sample(config)
    length = length_of(config, 4, found)
    assert length.steps == -(-3 * found.rows // 4)
    assert length.tokens == length.steps * 4 * found.tokens
    assert length.recommended.epochs == (1, 4)
    assert length.recommended.steps == (-(-found.rows // 4), found.rows)
    fixed = length_of(made(tmp_path, "causal-lm", path, **{"training.max_steps": 7}), 4, found)
    assert (fixed.steps, fixed.tokens) == (7, 7 * 4 * found.tokens)
    assert fixed.source.startswith("training.max_steps; tokens are counted from all 300 records")
    few = tmp_path / "few.jsonl"
    few.write_text("\n".join(json.dumps({"text": text}) for text in texts(2)))
    for steps in (-1, 7):
        config = made(tmp_path, "causal-lm", few, **{"training.max_steps": steps})
        assert "side of the split is empty" in length_of(config, 4, sample(config)).source
        with pytest.raises(DataError, match="side of the split is empty"):
            preprocess(config)
    (tmp_path / "empty.jsonl").touch()
    empty = made(tmp_path, "causal-lm", tmp_path / "empty.jsonl", **more)
    assert "no record is there" in length_of(empty, 4, sample(empty)).source
    absent = made(tmp_path, "causal-lm", tmp_path / "absent.jsonl", **more)
    length = length_of(absent, 4, sample(absent))
    assert length.steps is None
    assert "no file found there; run `steadytrain step preprocess FILE`" in length.source


def test_files_that_are_a_sample_scale_to_the_size_of_all_data(tmp_path):
    path = tmp_path / "texts.jsonl"
    path.write_text("\n".join(json.dumps({"text": text}) for text in texts(300)))
    epochs = {"training.max_steps": -1, "training.num_train_epochs": 50}
    config = made(tmp_path, "causal-lm", path, **epochs)
    here = sample(config)
    found = sample(config, 1000 * path.stat().st_size)
    assert (found.rows, found.tokens) == (1000 * here.rows, here.tokens)
    assert f"by {size(1000 * path.stat().st_size)} of data; counted from all" in found.source
    preprocess(config)
    hours = [
        plan_training(config, [find_gpu("h100")], data_bytes=given).offer.hours.middle
        for given in (None, 1000 * path.stat().st_size)
    ]
    assert hours[1] == pytest.approx(1000 * hours[0], rel=0.05)


def test_plan_without_access_to_the_data_does_not_count_them(tmp_path, monkeypatch):
    def refused(*_):
        raise StorageError("s3://bucket/x.jsonl: access denied")

    monkeypatch.setattr(sampling, "inputs_of", refused)
    found = sample(made(tmp_path, "causal-lm", "s3://bucket/x.jsonl"))
    assert (found.rows, found.source) == (
        None,
        "the data were not counted: s3://bucket/x.jsonl: access denied",
    )
