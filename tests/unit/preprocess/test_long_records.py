"""Chats longer than a row: what is learned of them, what is left out, and where it is counted."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steadytrain.components.preprocess.step import run
from steadytrain.components.shared.config import DataConfig, from_mapping
from steadytrain.components.shared.errors import ConfigError, DataError
from steadytrain.components.shared.events import read_events
from steadytrain.components.shared.events.types import Warned
from steadytrain.components.shared.left_out import in_one_line
from steadytrain.components.shared.workspace import Workspace
from steadytrain.components.tasks.encoding.fields import Defect
from steadytrain.components.tasks.encoding.tokens import Encoded, rows_of

from support.data import quarantined, sentence, side_rows, write_jsonl

SFT = "supervised_finetuning"
LENGTH = 128


def one(prompt, answer, more=0):
    """Return a chat whose tokens are their own places."""
    targets = [0] * prompt + [1] * answer + [0] * more
    return Encoded(list(range(len(targets))), targets)


@pytest.mark.parametrize("how", [None, "cut", "drop", "window"])
def test_a_record_that_fits_is_one_row_as_it_is(how):
    assert rows_of(one(4, 5, 1), 10, how) == [one(4, 5, 1)]


def test_cut_keeps_the_prompt_and_the_beginning_of_its_answer():
    assert rows_of(one(7, 40), 10, "cut") == [one(7, 3)]
    with pytest.raises(Defect, match="its prompt alone has 10 tokens") as caught:
        rows_of(one(10, 2), 10, "cut")
    assert caught.value.reason == "cut_to_nothing"


def test_a_prompt_longer_than_a_row_keeps_its_end_in_a_window():
    (row,) = rows_of(one(25, 3), 10, "window")
    assert row == Encoded(list(range(18, 28)), [0] * 7 + [1] * 3)


@given(
    turns=st.lists(st.tuples(st.integers(1, 60), st.integers(1, 60)), min_size=1, max_size=6),
    after=st.integers(0, 30),
    length=st.integers(8, 40),
)
def test_windows_predict_each_target_once_with_the_tokens_before_it(turns, after, length):
    targets = [value for given, own in turns for value in [0] * given + [1] * own] + [0] * after
    rows = rows_of(Encoded(list(range(len(targets))), targets), length, "window")
    pairs = [pair for row in rows for pair in zip(row.input_ids, row.targets, strict=True)]
    learned = [place for place, is_target in pairs if is_target]
    assert learned == [place for place, is_target in enumerate(targets) if is_target]
    for row in rows:
        start, first = row.input_ids[0], row.targets.index(1)
        assert row.input_ids == list(range(start, start + len(row.input_ids)))
        assert len(row.input_ids) <= length
        assert start == 0 or first >= length // 2


@pytest.fixture(scope="module")
def rows():
    """Return 60 short chats, 12 with a long answer, and 8 whose prompt alone fills a row."""
    sizes = [(4, 4)] * 60 + [(4, 120)] * 12 + [(120, 4)] * 8
    return [
        {"prompt": sentence(n, words=asked), "completion": sentence(n + 500, words=said)}
        for n, (asked, said) in enumerate(sizes)
    ]


@pytest.mark.parametrize(
    ("how", "told", "used"),
    [
        (None, "12 cut, 8 cut_to_nothing", 72),
        ("drop", "0 cut, 20 dropped_as_long", 60),
        ("window", "0 cut, 20 in windows", 80),
    ],
)
def test_every_long_record_is_counted_everywhere(tmp_path, configure, rows, how, told, used):
    path = write_jsonl(tmp_path / "x.jsonl", rows)
    config = configure(path, task=SFT, sequence_length=LENGTH, long_records=how)
    record = run(config)
    assert sum(side.documents for side in record.sides.values()) == used
    card = json.loads(record.path("card.json").read_text(encoding="utf-8"))
    assert f"{told}; used" in in_one_line(record, card)
    assert card["defective"] == 0
    assert len(quarantined(record)) == 80 - used
    (warned,) = [
        event.message
        for event in read_events(Workspace.of(config).events)
        if isinstance(event, Warned) and "longer than" in event.message
    ]
    assert warned.startswith("20 of 80 records are longer than data.sequence_length = 128")
    assert f"(data.long_records: {how or 'cut'}): {told};" in warned
    assert warned in card["warnings"]
    page = record.path("card.html").read_text(encoding="utf-8")
    assert told in page
    for side in record.sides:
        for row in side_rows(record, side):
            assert len(row["input_ids"]) <= LENGTH
            assert how == "window" or sum(row["lengths"]) == len(row["input_ids"])


def test_prompts_that_all_fill_a_row_are_an_error_with_the_fix(tmp_path, configure, rows):
    path = write_jsonl(tmp_path / "x.jsonl", rows[-8:])
    with pytest.raises(DataError, match="left out are 8 cut_to_nothing") as raised:
        run(configure(path, task=SFT, sequence_length=LENGTH))
    assert raised.value.remedy.startswith("raise data.sequence_length, or set data.long_records")


@pytest.mark.parametrize(
    ("task", "how", "fix"),
    [
        ("causal_lm", "cut", "leave it out"),
        ("text_embedding", "drop", "leave it out"),
        ("preference", "window", "use cut or drop"),
    ],
)
def test_it_is_refused_where_it_has_no_effect(task, how, fix):
    model = {"config": {"model_type": "gpt2"}, "vocab_size": 400}
    data = {"source": ["x"], "task": task, "long_records": how}
    with pytest.raises(ConfigError, match=f"{task} does not support it") as raised:
        from_mapping({"name": "x", "output": "o", "model": model, "data": data})
    assert fix in f"{raised.value} {raised.value.remedy}"


def test_only_chats_and_pairs_have_a_default():
    tasks = (SFT, "preference", "causal_lm")
    found = [DataConfig(source=["x"], task=task).fits_long_records for task in tasks]
    assert found == ["cut", "cut", None]
