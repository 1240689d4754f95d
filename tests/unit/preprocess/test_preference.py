"""Pairs of answers: which forms are read, what is learned of them, and what is set aside."""

from __future__ import annotations

import json

import pytest

from steadytrain.components.preprocess.validate import check
from steadytrain.components.shared.config import DataConfig
from steadytrain.components.tasks.encoding.base import Fitted
from steadytrain.components.tasks.encoding.fields import Defect
from steadytrain.components.tasks.encoding.preference import PreferenceEncoder, PreferenceRows
from steadytrain.components.tasks.encoding.tokens import load_tokenizer

from support.tiny import make_tokenizer
from support.weight_digests import CHATML


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


SYSTEM, QUESTION = said("system", "be brief"), said("user", "why?")
EARLIER = [said("user", "hi"), said("assistant", "hello")]
SO, NO = said("assistant", "so"), said("assistant", "no")
WHOLE = {
    "text": ("why?", [QUESTION], [QUESTION]),
    "list": ([QUESTION], [QUESTION], [QUESTION]),
    "white space": ("why? ", [QUESTION], [QUESTION]),
    "list with a system message": ([SYSTEM, QUESTION], [SYSTEM, QUESTION], [SYSTEM, QUESTION]),
    "system message in the answers alone": ("why?", [SYSTEM, QUESTION], [SYSTEM, QUESTION]),
    "system message in the prompt alone": ([SYSTEM, QUESTION], [QUESTION], [SYSTEM, QUESTION]),
    "system message as the prompt": ([SYSTEM], [QUESTION], [SYSTEM, QUESTION]),
    "first turn": ("hi", [*EARLIER, QUESTION], [*EARLIER, QUESTION]),
    "last turn": ("why?", [*EARLIER, QUESTION], [*EARLIER, QUESTION]),
    "continued": ([SYSTEM, *EARLIER], [QUESTION], [SYSTEM, *EARLIER, QUESTION]),
    "answers alone": ([*EARLIER, QUESTION], [], [*EARLIER, QUESTION]),
}
"""By name: a prompt, what both answers begin with, and what the model gets before its answer."""


@pytest.mark.parametrize("form", WHOLE)
def test_the_prompt_of_whole_conversations_is_learned_once(tmp_path, form):
    """The layout of UltraFeedback. The tokens are compared with those of the chat template."""
    tokenizer = make_tokenizer(50)
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(tmp_path)
    prompt, start, context = WHOLE[form]
    record = {"prompt": prompt, "chosen": [*start, SO], "rejected": [*start, NO]}
    content = encoder().read(record)
    (found,) = PreferenceRows(tmp_path, 512).encode([content])
    values = found.rows[0].values
    ids = values["input_ids"].tolist()
    parts = [
        tokenizer.apply_chat_template([*context, answer], tokenize=True, return_dict=False)
        for answer in (SO, NO)
    ]
    assert ids == parts[0] + parts[1]
    assert values["lengths"].tolist() == [len(part) for part in parts]
    learned = tokenizer.decode(values["input_ids"][values["targets"] == 1])
    assert learned == "so<|end|>no<|end|>"


@pytest.mark.slow
@pytest.mark.parametrize("prompt", ["why?", [QUESTION]])
def test_whole_conversations_are_divided_as_trl_does(prompt):
    from trl.data_utils import extract_prompt

    turns = [SYSTEM, *EARLIER, QUESTION]
    record = {"prompt": prompt, "chosen": [*turns, SO], "rejected": [*turns, NO]}
    expected = extract_prompt({"chosen": record["chosen"], "rejected": record["rejected"]})
    assert json.loads(encoder().read(record).text) == expected


@pytest.mark.parametrize(
    ("prompt", "chosen", "rejected"),
    [
        ("where?", [QUESTION, SO], [QUESTION, NO]),
        ([said("user", "where?")], [QUESTION, SO], [QUESTION, NO]),
        ([said("system", "be long"), QUESTION], [SYSTEM, QUESTION, SO], [SYSTEM, QUESTION, NO]),
        ("why?", [SYSTEM, QUESTION, SO], [QUESTION, NO]),
        ("why?", [QUESTION, SO], "no"),
        ("why?", "so", [QUESTION, NO]),
        ("why?", [QUESTION, SO], [said("user", "where?"), NO]),
    ],
)
def test_a_prompt_that_the_answers_do_not_begin_with_is_a_defect(prompt, chosen, rejected):
    with pytest.raises(Defect, match="prompt is not what chosen and rejected begin with") as caught:
        encoder().read({"prompt": prompt, "chosen": chosen, "rejected": rejected})
    assert caught.value.reason == "prompt_mismatch"


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


CONTRADICTIONS = {
    "score_chosen is 2, less than score_rejected, which is 3.5": {
        "score_chosen": 2,
        "score_rejected": 3.5,
    },
    "chosen-rating is 1, less": {"chosen-rating": "1", "rejected-rating": "2"},
    "tie is true": {"tie": True},
    "winner_tie is 1": {"winner_tie": 1},
    "winner is tie ": {"winner": "Tie (both bad)"},
    "preferred is rejected": {"preferred": "rejected"},
    "": {
        "score_chosen": 3,
        "score_rejected": 3,
        "chosen_model": "a",
        "rejected_model": "b",
        "chosen_score": 1,
        "rejected_score": None,
        "tie": 0,
        "winner": "model_a",
    },
}


@pytest.mark.parametrize("detail", CONTRADICTIONS)
def test_a_pair_that_another_column_contradicts_is_a_defect(detail):
    data = DataConfig(source=["x"], task="preference", columns={"slice": "winner_score"})
    row = {**FORMS["text"], **CONTRADICTIONS[detail], "winner_score": 0}
    if not detail:
        check(row, data, PreferenceEncoder(data))
        return
    with pytest.raises(Defect, match=detail) as caught:
        check(row, data, PreferenceEncoder(data))
    assert caught.value.reason == "contradicted"


def test_answers_that_a_template_prints_alike_have_their_own_reason(tokens):
    pair = {"prompt": "a", "chosen": [SO], "rejected": [{**SO, "name": "Ann"}]}
    rows = encoder(sequence_length=40).row_encoder(Fitted(tokens, (), frozenset(), tokens))
    (found,) = rows.encode([encoder().read(pair)])
    assert found.reason == "printed_alike"


def test_a_long_answer_is_truncated_and_a_long_prompt_leaves_the_pair_out(tokens):
    rows = encoder(sequence_length=40).row_encoder(Fitted(tokens, (), frozenset(), tokens))
    long = {"prompt": "a", "chosen": "b" * 90, "rejected": "c"}
    hopeless = {"prompt": "a" * 90, "chosen": "b", "rejected": "c"}
    short, none = rows.encode([encoder().read(record) for record in (long, hopeless)])
    assert short.truncated
    assert short.rows[0].values["lengths"][0] == 40
    assert none.reason == "cut_to_nothing"
    assert none.detail == "its prompt alone has 111 tokens, and data.sequence_length = 40"
    late = {"prompt": "a", "chosen": "b" * 90 + "c", "rejected": "b" * 90}
    (none,) = rows.encode([encoder().read(late)])
    assert none.detail == "its answers differ only after 40 tokens (data.sequence_length)"
    dropping = encoder(sequence_length=40, long_records="drop")
    rows = dropping.row_encoder(Fitted(tokens, (), frozenset(), tokens))
    assert [one.reason for one in rows.encode([encoder().read(long)])] == ["dropped_as_long"]
