"""Records that are marked as good or bad are not learned as if all were good."""

from __future__ import annotations

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from steadytrain.components.preprocess.inspection import inspect, task_of
from steadytrain.components.preprocess.step import run
from steadytrain.components.shared.errors import BadInput, DataError
from steadytrain.components.tasks.encoding.fields import is_judgment
from steadytrain.pipelines.sources import find_task

from support.data import quarantined, sentence, write_jsonl

COUNT = 60


def answered(**more):
    """Return records with a prompt and a completion; functions of the number give other columns."""
    return [
        {"prompt": sentence(n), "completion": sentence(n + 1000)}
        | {name: value(n) for name, value in more.items()}
        for n in range(COUNT)
    ]


def chats(**more):
    return [
        {
            "messages": [
                {"role": "user", "content": row.pop("prompt")},
                {"role": "assistant", "content": row.pop("completion")},
            ],
            **row,
        }
        for row in answered(**more)
    ]


def write_csv(path, rows):
    lines = [",".join(rows[0]), *(",".join(map(str, row.values())) for row in rows)]
    path.write_text("\n".join(lines))
    return path


def write_parquet(path, rows):
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


KTO = {"label": lambda n: n % 2 == 0}
FEEDBACK = {
    "KTO": (answered(**KTO), "label is True"),
    "numbers": (answered(label=lambda n: n % 2), "label is 0"),
    "chats": (chats(**KTO), "label is True"),
    "score": (answered(score=lambda n: n / 7), r"score is 0\.0"),
    "reward": (chats(reward=lambda n: -n), "reward is 0"),
    "weight": (chats(weight=lambda n: n % 2), "weight is 0"),
    "correct": (answered(is_correct=lambda n: n % 2 == 0), "is_correct is True"),
    "ratings": (answered(Ratings=lambda n: str(n % 5)), "Ratings is 0"),
}


@pytest.mark.parametrize("layout", FEEDBACK)
def test_feedback_is_refused_in_init_and_preprocess(tmp_path, configure, layout):
    rows, named = FEEDBACK[layout]
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    config = configure(path, task="supervised_finetuning")
    with pytest.raises(DataError, match=rf"60 of 60 records say how good .*{named}") as caught:
        run(config)
    assert "drop or rename the column" in caught.value.remedy
    assert "data.task unpaired_preference" in caught.value.remedy
    if layout in ("KTO", "numbers"):
        assert find_task(str(path), [])[0] == "unpaired_preference"
        return
    with pytest.raises(BadInput, match=rf"60 of the first 60 records say .*{named}") as refused:
        find_task(str(path), [])
    assert caught.value.remedy.startswith(refused.value.remedy)


@pytest.mark.slow
@pytest.mark.parametrize("write", [write_csv, write_parquet])
def test_feedback_is_refused_in_other_formats(tmp_path, configure, write):
    path = write(tmp_path / f"rows.{write.__name__.removeprefix('write_')}", answered(**KTO))
    with pytest.raises(DataError, match="label is True"):
        run(configure(path, task="supervised_finetuning"))


def test_a_few_marked_records_are_left_out_and_counted(tmp_path, configure):
    rows = answered(label=lambda n: False if n in (5, 9) else None)
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    record = run(configure(path, task="supervised_finetuning", sequence_length=256))
    assert [entry["reason"] for entry in quarantined(record)] == ["judged"] * 2
    card = json.loads(record.path("card.json").read_text())
    assert card["defective"] == 2


@pytest.mark.parametrize(
    ("more", "data"),
    [
        ({"topic": lambda n: n}, {}),
        ({"label": lambda n: "sports"}, {}),
        ({"score": lambda n: "high"}, {}),
        ({"score": lambda n: None}, {}),
        ({"score": lambda n: n % 3}, {"columns": {"slice": "score"}}),
        ({"label": lambda n: n % 2}, {"columns": {"slice": "label"}}),
    ],
)
def test_other_columns_and_named_ones_are_no_question(tmp_path, configure, more, data):
    path = write_jsonl(tmp_path / "rows.jsonl", answered(**more))
    record = run(configure(path, task="supervised_finetuning", sequence_length=256, **data))
    assert quarantined(record) == []


def test_other_tasks_use_or_ignore_such_columns(tmp_path, configure):
    pairs = [
        {"prompt": sentence(n), "chosen": "yes", "rejected": "no", "score": n} for n in range(COUNT)
    ]
    config = configure(write_jsonl(tmp_path / "pairs.jsonl", pairs))
    assert task_of(inspect(config.data), config.data)[0] == "preference"
    plain = [{"text": sentence(n), "score": n} for n in range(COUNT)]
    run(configure(write_jsonl(tmp_path / "plain.jsonl", plain)))


@pytest.mark.parametrize(
    ("column", "value", "expected"),
    [
        ("label", True, True),
        ("label", "False", True),
        ("label", 1, True),
        ("label", 7, False),
        ("label", "good", False),
        ("label", None, False),
        ("REWARD", -0.5, True),
        ("rating", "4", True),
        ("rating", [4], False),
        ("underscore", 3, False),
        ("is_correct", False, True),
        ("accepted", "no", True),
        ("thumbs_up", 1, True),
        ("feedback", "thumbs down", True),
        ("feedback", "Well done, thank you.", False),
        ("quality", 0.4, True),
        ("quality", "high", False),
        ("correct", "Paris", False),
    ],
)
def test_what_is_a_judgment(column, value, expected):
    assert is_judgment(column, value, "label") is expected
