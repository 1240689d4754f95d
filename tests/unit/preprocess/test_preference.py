"""Pairs of answers: which forms are read, what is learned of them, and what is set aside."""

from __future__ import annotations

import json

import pytest

from steadytrain.components.shared.config import DataConfig
from steadytrain.components.tasks.encoding.base import Fitted
from steadytrain.components.tasks.encoding.fields import Defect
from steadytrain.components.tasks.encoding.preference import PreferenceEncoder, PreferenceRows
from steadytrain.components.tasks.encoding.tokens import load_tokenizer

from support.tiny import make_tokenizer


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokens")
    make_tokenizer(50).save_pretrained(folder)
    return folder


def encoder(**data):
    return PreferenceEncoder(DataConfig(source=["unused"], task="preference", **data))


def said(role, content):
    return {"role": role, "content": content}


FORMS = {
    "text": {"prompt": "why?", "chosen": "so", "rejected": "no"},
    "messages": {
        "prompt": [said("user", "why?")],
        "chosen": [said("assistant", "so")],
        "rejected": [said("assistant", "no")],
    },
    "whole conversations": {
        "chosen": [said("user", "why?"), said("assistant", "so")],
        "rejected": [said("user", "why?"), said("assistant", "no")],
    },
}


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_a_pair_have_the_same_content(form):
    assert json.loads(encoder().read(FORMS[form]).text) == FORMS["messages"]


def test_targets_are_the_answers_alone(tokens):
    turns = [said("user", "hi"), said("assistant", "import"), said("user", "why?")]
    record = {"prompt": turns, "chosen": "so be it", "rejected": "no"}
    content = encoder().read(record)
    (found,) = PreferenceRows(tokens, 512).encode([content])
    (row,) = found.rows
    tokenizer, values = load_tokenizer(tokens), row.values
    first = values["lengths"][0]
    texts = [
        tokenizer.decode(values["input_ids"][part][values["targets"][part] == 1])
        for part in (slice(0, first), slice(first, None))
    ]
    assert texts == ["so be it<|end|>", "no<|end|>"]
    assert values["lengths"].sum() == len(values["input_ids"]) == row.tokens
    assert row.targets == 1


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({**FORMS["text"], "rejected": "so"}, "wrong_type"),
        ({**FORMS["text"], "rejected": 3}, "wrong_type"),
        ({**FORMS["text"], "chosen": " "}, "empty_field"),
        ({"chosen": "so", "rejected": "no"}, "missing_field"),
        ({**FORMS["text"], "chosen": [said("user", "so")]}, "bad_messages"),
    ],
)
def test_a_pair_that_teaches_nothing_is_set_aside(record, reason):
    with pytest.raises(Defect) as caught:
        encoder().read(record)
    assert caught.value.reason == reason


def test_a_long_answer_is_truncated_and_a_long_prompt_is_a_defect(tokens):
    rows = encoder(sequence_length=40).row_encoder(Fitted(tokens, (), frozenset(), tokens))
    long = {"prompt": "a", "chosen": "b" * 90, "rejected": "c"}
    hopeless = {"prompt": "a" * 90, "chosen": "b", "rejected": "c"}
    short, none = rows.encode([encoder().read(record) for record in (long, hopeless)])
    assert short.truncated
    assert short.rows[0].values["lengths"][0] == 40
    assert none.reason == "too_long"
