"""Pairs of texts with a class: both are read, compared, counted and shown."""

from __future__ import annotations

import json

import pytest

from steadytrain.components.preprocess.data_card import show
from steadytrain.components.preprocess.step import run
from steadytrain.components.shared.errors import BadInput, ConfigError
from steadytrain.components.tasks.base import open_encoder
from steadytrain.pipelines.sources import find_task

from support.data import quarantined, sentence, side_rows, write_jsonl
from support.weight_digests import BERT

COLUMNS = {"text": "premise", "text_pair": "hypothesis"}
NAMED = [f"data.columns.{name}={column}" for name, column in COLUMNS.items()]


def row(number, hypothesis=None, label=None):
    return {
        "premise": sentence(number),
        "hypothesis": sentence(number + 500) if hypothesis is None else hypothesis,
        "label": label or ("yes" if number % 2 else "no"),
    }


@pytest.fixture
def pairs(tmp_path, configure):
    """Pairs of which some share a text, are equal, are long, or lack the second."""
    odd = [
        row(0),
        row(1, label="no"),
        *(row(2, hypothesis=sentence(900 + n)) for n in range(3)),
        row(4, hypothesis=" ".join(map(sentence, range(700, 720)))),
        row(5, hypothesis=" "),
    ]
    path = write_jsonl(tmp_path / "pairs.jsonl", [*map(row, range(60)), *odd])
    return path, configure(
        path,
        task="sequence_classification",
        columns=COLUMNS,
        sequence_length=512,
        max_bad_share=0.1,
        model={"config": {**BERT, "max_position_embeddings": 512}, "vocab_size": 400},
    )


def test_both_texts_are_read_compared_and_counted(pairs):
    path, config = pairs
    record = run(config)
    card = json.loads(record.path("card.json").read_text())
    reasons = [entry["reason"] for entry in quarantined(record)]
    # The same premise with another hypothesis is another record.
    assert sorted(reasons) == ["conflicting_label"] * 2 + ["empty_field", "exact_duplicate"]
    assert card["unused"] == {}
    assert all(
        set(each) == set(open_encoder(config.data).schema.names)
        for each in side_rows(record, "train")
    )
    assert sum(side["truncated"] for side in card["sides"].values()) == 1
    task, reason = find_task(str(path), NAMED)
    assert (task, "data.columns.text_pair says so" in reason) == ("sequence_classification", True)
    assert "not used" not in reason
    first, *_ = show(config, 1)
    (document,) = first.rows[0]
    shown = "".join(piece.text for piece in document.pieces)
    assert row(0)["premise"][:60] in shown
    assert row(0)["hypothesis"][-60:] in shown


def test_init_names_the_fields_of_a_pair(pairs):
    path, _ = pairs
    with pytest.raises(BadInput) as caught:
        find_task(str(path), [])
    assert " ".join(f"--set {each}" for each in NAMED) in caught.value.remedy


@pytest.mark.parametrize(
    "task", ["causal_lm", "masked_lm", "supervised_finetuning", "text_embedding"]
)
def test_other_tasks_refuse_a_second_text(configure, task):
    with pytest.raises(ConfigError, match=f"text_pair.*{task} does not read it"):
        configure("rows.jsonl", task=task, columns=COLUMNS)


def test_parts_refuse_a_second_text(configure):
    parts = {name: {"source": [name], "columns": COLUMNS} for name in "ab"}
    with pytest.raises(ConfigError, match=r"parts\.a\.columns\.text_pair"):
        configure(["a", "b"], task="multi_task", parts=parts)
