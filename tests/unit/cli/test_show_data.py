"""`show-data`: the first records as the model sees them, and why others are not used."""

from __future__ import annotations

import json

import pytest

from steadytrain.components.preprocess.data_card import Document, Piece
from steadytrain.pipelines.model_commands import _marked

from support.odd import call

ESCAPE = "\x1b[31mred\x1b]0;title\x07"
ROWS = [
    {"prompt": f"Why {ESCAPE}?", "completion": "so it is"},
    {"prompt": "x", "completion": 5},
    {"prompt": "y", "completion": "long " * 40},
]
MODEL = "model={config: {model_type: gpt2}, vocab_size: 400}"


@pytest.fixture
def shown(tmp_path):
    def call_it(rows, task, *options):
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        given = [f"data.task={task}", MODEL, "data.sequence_length=40"]
        sets = [part for item in given for part in ("--set", item)]
        ending = call("show-data", str(path), *sets, *options, folder=tmp_path)
        assert not ending.code, ending.err
        assert [item.name for item in tmp_path.iterdir()] == ["rows.jsonl"]
        return ending.out

    return call_it


def test_targets_are_marked_and_bad_records_have_their_reason(shown):
    output = shown(ROWS, "supervised_finetuning")
    assert "[[so it is<|endoftext|>]]" in output
    assert output.count("[[") == 2
    assert "line 2 of" in output
    assert "not used, wrong_type: completion is int, not text" in output
    assert ", cut\n(40 tokens, " in output
    assert "\x1b" not in output
    assert "\x07" not in output


@pytest.mark.parametrize(
    ("train_on", "told"),
    [
        ("last_turn", "so<|endoftext|>\n<|user|>\nhow<|endoftext|>\n<|assistant|>\n[[thus"),
        ("all", "<|user|>[[\nwhy<|endoftext|>\n<|assistant|>\n]]so<|endoftext|>[[\n<|user|>"),
    ],
)
def test_what_is_learned_of_a_chat_is_what_the_configuration_says(shown, train_on, told):
    said = [("user", "why"), ("assistant", "so"), ("user", "how"), ("assistant", "thus")]
    messages = [{"role": role, "content": text} for role, text in said]
    messages[1]["weight"] = 0
    sets = ("--n", "1", "--set", f"data.train_on={train_on}")
    assert told in shown([{"messages": messages}] * 2, "supervised_finetuning", *sets)


def test_keys_of_messages_that_the_model_does_not_see_are_named(shown):
    asked = {"role": "user", "content": "why", "na\x1b[2Jme": 1}
    row = {"messages": [asked, {"role": "assistant", "content": "so", "name": "Ann"}]}
    output = shown([row] * 2, "supervised_finetuning", "--n", "1")
    assert "tokens; keys of messages that nothing reads: 1 na [2Jme; keys of" in output
    assert "the chat template does not print: 1 name\n" in output
    assert "\x1b" not in output


def test_targets_are_green_on_a_terminal():
    document = Document("", 2, 1, [Piece(ESCAPE, False), Piece("so\x1b[5m", True)])
    assert _marked(document, color=True).endswith("\x1b[32mso\x1b[0m")
    assert _marked(document, color=True).count("\x1b") == 2


@pytest.mark.parametrize(
    ("row", "task", "told"),
    [
        ({"prompt": "q", "chosen": "a b", "rejected": "c"}, "preference", "(rejected, "),
        ({"text": "how to", "label": "help\x1b[2J"}, "sequence_classification", ", label help"),
        ({"text": "how to"}, "causal_lm", "[[how to<|endoftext|>]]"),
    ],
)
def test_each_task_shows_what_it_learns(shown, row, task, told):
    output = shown([row] * 2, task, "--n", "1")
    assert told in output
    assert output.count("--- line") == 1
    assert "\x1b" not in output


def test_json_has_every_piece(shown):
    records = json.loads(shown(ROWS, "supervised_finetuning", "--json"))["records"]
    assert [record["problem"] for record in records] == [
        "",
        "wrong_type: completion is int, not text",
        "",
    ]
    assert [record["cut"] for record in records] == [False, False, True]
    (((document,),),) = [records[0]["rows"]]
    assert document["pieces"][-2] == {"text": "so it is<|endoftext|>", "target": True}


def test_records_of_a_table_are_shown_with_their_labels(tmp_path):
    (tmp_path / "houses.csv").write_text("rooms,kind\n3,flat\n5,house\n,flat\n2,\n")
    settings = [f"data.source=[{tmp_path / 'houses.csv'}]", "data.target=kind"]
    sets = [part for setting in settings for part in ("--set", setting)]
    ending = call("show-data", "tabular", *sets, folder=tmp_path)
    assert not ending.code, ending.err
    assert 'houses.csv: a record, label flat\n{"rooms": "3"}' in ending.out
    assert "not used" in ending.out
    assert "tokens" not in ending.out


def test_data_that_are_absent_are_an_error(tmp_path):
    ending = call("show-data", "absent.jsonl", folder=tmp_path)
    assert ending.code == 2
    assert "absent.jsonl" in ending.err
