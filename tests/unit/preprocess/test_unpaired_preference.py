"""Feedback without pairs: which forms are read, what is learned of them, and what is set aside."""

from __future__ import annotations

import json

import pytest

from steadytrain.components.preprocess.step import run
from steadytrain.components.shared.config import DataConfig
from steadytrain.components.tasks.encoding.fields import Defect
from steadytrain.components.tasks.encoding.preference import (
    UnpairedPreferenceEncoder,
    UnpairedPreferenceRows,
)

from support.data import quarantined, sentence, side_rows, write_jsonl
from support.tiny import make_language_model, make_tokenizer
from support.weight_digests import CHATML

QUESTION, ANSWER = ({"role": "user", "content": "why?"}, {"role": "assistant", "content": "so"})


def read(**row):
    encoder = UnpairedPreferenceEncoder(DataConfig(source=["x"], task="unpaired_preference"))
    return encoder.read(row)


def rows_in(folder, content, length=512, long_records=None):
    tokenizer = make_tokenizer(50)
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(folder)
    (found,) = UnpairedPreferenceRows(folder, length, long_records).encode([content])
    return tokenizer, found


@pytest.mark.parametrize("prompt", ["why?", [QUESTION]])
@pytest.mark.parametrize("completion", ["so", [ANSWER]])
def test_text_and_messages_are_the_same_record(tmp_path, prompt, completion):
    content = read(prompt=prompt, completion=completion, label=True)
    assert content == read(prompt="why?", completion="so", label=True)
    tokenizer, found = rows_in(tmp_path, content)
    values = found.rows[0].values
    whole = tokenizer.apply_chat_template([QUESTION, ANSWER], tokenize=False)
    assert values["input_ids"].tolist() == tokenizer.encode(whole, add_special_tokens=False)
    targets = [
        token for token, on in zip(values["input_ids"], values["targets"], strict=True) if on
    ]
    assert tokenizer.decode(targets).startswith("so")
    assert "why" not in tokenizer.decode(targets)
    assert values["lengths"].tolist() == [len(values["input_ids"])]


@pytest.mark.parametrize(
    ("label", "good"),
    [(True, True), (False, False), (1, True), (0, False), ("True", True), (" false", False),
     ("+1", True), (-1, False)],
)  # fmt: skip
def test_the_verdict_reaches_the_row(tmp_path, label, good):
    content = read(prompt="why?", completion="so", label=label)
    _, found = rows_in(tmp_path, content)
    assert found.rows[0].values["desirable"] is good


@pytest.mark.parametrize(
    ("row", "reason", "detail"),
    [
        ({"label": None}, "missing_field", "label is absent or null"),
        ({"label": 3}, "wrong_type", "label is '3', not true or false"),
        ({"label": "good"}, "wrong_type", "not true or false"),
        ({"prompt": None}, "missing_field", "prompt"),
        ({"completion": " "}, "empty_field", "completion"),
        ({"completion": [QUESTION, ANSWER]}, "prompt_mismatch", "a whole conversation"),
        ({"completion": [QUESTION]}, "bad_messages", "in completion, the assistant says nothing"),
    ],
)
def test_what_cannot_be_read_is_named(row, reason, detail):
    with pytest.raises(Defect) as caught:
        read(**{"prompt": "why?", "completion": "so", "label": True, **row})
    assert caught.value.reason == reason
    assert detail in caught.value.detail


def test_a_long_answer_is_cut_or_dropped(tmp_path):
    content = read(prompt="why?", completion="so " * 300, label=True)
    _, cut = rows_in(tmp_path, content, 64, "cut")
    assert cut.truncated
    assert len(cut.rows[0].values["input_ids"]) == 64
    _, dropped = rows_in(tmp_path, content, 64, "drop")
    assert dropped.reason == "dropped_as_long"


def test_one_answer_may_be_good_to_one_person_and_bad_to_another(tmp_path, configure):
    """Both count, as in TRL; a record that is repeated counts once."""
    rows = [
        {"prompt": sentence(n), "completion": sentence(n + 1000), "label": label}
        for n in range(60)
        for label in (True, False)
    ]
    path = write_jsonl(tmp_path / "rows.jsonl", [*rows, rows[0]])
    base = tmp_path / "base"
    tokenizer = make_tokenizer(60)
    tokenizer.save_pretrained(base)
    make_language_model("llama", len(tokenizer), 1024).save_pretrained(base)
    model = {"base": str(base)}
    record = run(configure(path, model=model, task="unpaired_preference", sequence_length=1024))
    assert [entry["reason"] for entry in quarantined(record)] == ["exact_duplicate"]
    found = side_rows(record, "train")
    assert sum(row["desirable"] for row in found) == len(found) / 2
    assert json.loads(record.path("card.json").read_text())["defective"] == 0
