"""Data of several parts: each is read in its own way, and none disturbs another."""

from __future__ import annotations

import json

import pytest

from steadytrain.components.preprocess.inputs import find_inputs
from steadytrain.components.preprocess.profile import profile_of
from steadytrain.components.preprocess.step import run
from steadytrain.components.shared.class_names import part_of
from steadytrain.components.shared.config import from_mapping
from steadytrain.components.shared.errors import DataError
from steadytrain.components.tasks.base import OpenTask
from steadytrain.components.techniques.text_augmentation import AugmentationConfig
from steadytrain.components.train.loop.data import Rows

from support.data import read_table, sentence, write_jsonl
from support.weight_digests import BERT

SHARED = 40


@pytest.fixture
def configure(tmp_path):
    """Return what writes two parts, which share their first texts, and configures a run."""

    def configured(*, moods=("good", "bad"), column="mood", **topic):
        mood = [{"body": sentence(n), "mood": moods[n % len(moods)]} for n in range(200)]
        topics = [
            {"text": sentence(n if n < SHARED else n + 1000), "label": "xyz"[n % 3]}
            for n in range(300)
        ]
        parts = {
            "mood": {
                "source": [str(write_jsonl(tmp_path / "mood.jsonl", mood))],
                "columns": {"text": "body", "label": column},
            },
            "topic": {"source": [str(write_jsonl(tmp_path / "topic.jsonl", topics))], **topic},
        }
        shares = {"test_share": 0.2, "validation_share": 0.2, "sequence_length": 64}
        return from_mapping(
            {
                "name": "tiny",
                "output": str(tmp_path / "output"),
                "data": {"task": "multi_task", "parts": parts, **shares},
                "model": {"config": BERT, "vocab_size": 300},
                "gate": {"max_slice_regression": 0.02},
            }
        )

    return configured


def test_each_record_of_each_part_is_kept_with_the_label_of_its_part(configure, tmp_path):
    config = configure()
    record = run(config)
    assert record.labels == ["mood/bad", "mood/good", "topic/x", "topic/y", "topic/z"]
    # A text of both parts has two labels, which neither conflict nor make it a duplicate.
    assert sum(side.documents for side in record.sides.values()) == 500
    profile = profile_of(find_inputs(config.data), config.data, tmp_path)
    assert profile == record.profile


def test_a_text_of_two_parts_is_on_one_side(configure):
    record = run(configure())
    table = read_table(record.path(record.test_records)).to_pylist()
    slices = {row["text"]: set() for row in table}
    for row in table:
        slices[row["text"]].add(row["slice"])
    shared = [slices[text] for text in map(sentence, range(SHARED)) if text in slices]
    assert shared
    assert all(each == {"mood", "topic"} for each in shared)
    train = Rows([record.path(name) for name in record.sides["train"].shards])
    assert len(train) == record.sides["train"].documents


def test_rows_of_all_parts_have_texts_to_augment(configure):
    config = configure()
    augmentation = AugmentationConfig(deletion=0.3)
    training = config.training.model_copy(update={"augmentation": augmentation})
    config = config.model_copy(update={"training": training})
    record = run(config)
    rows = Rows([record.path(name) for name in record.sides["train"].shards])
    rows.check_texts()
    task = OpenTask(config, record).training
    shorter = dict.fromkeys(("mood", "topic"), 0)
    for place, row in enumerate(rows):
        drawn = task.draw(row, place, training=True)
        part = part_of(record.labels[drawn["label"]])
        shorter[part] += len(drawn["input_ids"]) < len(row["input_ids"])
    assert min(shorter.values()) > 50


def test_given_labels_of_a_part_keep_their_order(configure):
    record = run(configure(labels=["z", "y", "x"]))
    assert record.labels == ["mood/bad", "mood/good", "topic/z", "topic/y", "topic/x"]


def test_missing_column_names_its_part(configure):
    with pytest.raises(
        DataError, match="no record of the part 'mood' has the column 'feeling' "
    ) as caught:
        run(configure(column="feeling"))
    assert caught.value.remedy.startswith(
        "name one of these columns in data.parts.mood.columns.label;"
    )


def test_one_label_in_a_part_names_it(configure):
    with pytest.raises(DataError, match=r"of the part 'mood' has 1 different labels \(mood/good"):
        run(configure(moods=("good",)))


@pytest.mark.parametrize("both", [True, False])
def test_a_split_is_kept_if_each_part_has_it(both, configure, tmp_path):
    """The parts share texts, and none of those of the test side is in training."""
    rows = [{"text": sentence(n), "label": "xyz"[n % 3]} for n in range(60)]
    test = write_jsonl(tmp_path / "own" / "test.jsonl", rows)
    config = configure(source=[str(tmp_path / "topic.jsonl"), str(test)])
    if both:
        moods = [{"body": sentence(n), "mood": "bad"} for n in range(2000, 2020)]
        part = config.data.parts["mood"]
        sources = [*part.source, str(write_jsonl(tmp_path / "own" / "dev" / "test.jsonl", moods))]
        parts = {**config.data.parts, "mood": part.model_copy(update={"source": sources})}
        config = config.model_copy(update={"data": config.data.model_copy(update={"parts": parts})})
    record = run(config)
    card = json.loads(record.path("card.json").read_text())
    texts = read_table(record.path(record.test_records))["text"].to_pylist()
    if both:
        assert sorted(texts) == sorted(sentence(n) for n in [*range(60), *range(2000, 2020)])
        assert (card["duplicates"]["leakage"], card["duplicates"]["group_leakage"]) == (SHARED, 60)
        assert "has a test split of 80 records, kept as that side" in card["warnings"][0]
    else:
        assert len(set(texts) - {sentence(n) for n in range(60)}) > 20
        assert "not each of data.parts has a test split" in card["warnings"][0]
