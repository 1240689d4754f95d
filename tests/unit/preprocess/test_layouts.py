"""Records in the layouts of other tools are read, and what nothing reads is named."""

from __future__ import annotations

import json

import pytest

from steadytrain.components.preprocess.step import run
from steadytrain.components.preprocess.validate import ColumnUse
from steadytrain.components.shared.config import DataConfig
from steadytrain.components.shared.config.data_sections import Columns
from steadytrain.components.shared.events import read_events
from steadytrain.components.shared.events.types import StepFinished, Warned
from steadytrain.components.shared.workspace import Workspace
from steadytrain.components.tasks.base import open_encoder
from steadytrain.components.tasks.encoding.chat import ChatEncoder
from steadytrain.components.tasks.encoding.fields import Defect
from steadytrain.pipelines.sources import find_task

from support.data import sentence, side_rows, write_jsonl

COUNT = 60


def said(*turns):
    return [{"role": role, "content": content} for role, content in turns]


def shared(*turns):
    return [{"from": role, "value": content} for role, content in turns]


ASKED = said(("user", "Q"), ("assistant", "A"))
ALPACA = {"instruction": "Q", "input": "", "output": "A"}
READ = {
    "prompt and completion": ({"prompt": "Q", "completion": "A"}, {}, ASKED),
    "lists of messages": ({"prompt": ASKED[:1], "completion": ASKED[1:]}, {}, ASKED),
    "text and a list": ({"prompt": "Q", "completion": ASKED[1:]}, {}, ASKED),
    "a longer prompt": (
        {"prompt": said(("system", "S"), ("user", "Q")), "completion": "A"},
        {},
        said(("system", "S"), ("user", "Q"), ("assistant", "A")),
    ),
    "answers in the prompt are context": (
        {"prompt": [*ASKED, *ASKED[:1]], "completion": "A"},
        {},
        [ASKED[0], {**ASKED[1], "train": False}, *ASKED],
    ),
    "Alpaca": (
        ALPACA | {"input": "I"},
        {},
        said(("user", "Q\nI"), ("assistant", "A")),
    ),
    "Alpaca without input": (ALPACA, {}, ASKED),
    "Alpaca with a null": (ALPACA | {"input": None}, {}, ASKED),
    "Alpaca without the column": ({"instruction": "Q", "output": "A"}, {}, ASKED),
    "an instruction by name": (
        {"instruction": "Q", "input": "I", "response": "A"},
        {"prompt": "instruction", "completion": "response"},
        said(("user", "Q\nI"), ("assistant", "A")),
    ),
    "another input": (
        {"question": "Q", "context": "I", "answer": "A"},
        {"prompt": "question", "completion": "answer", "input": "context"},
        said(("user", "Q\nI"), ("assistant", "A")),
    ),
    "ShareGPT": (
        {"conversations": shared(("system", "S"), ("human", "Q"), ("gpt", "A"), ("tool", "T"))},
        {},
        said(("system", "S"), ("user", "Q"), ("assistant", "A"), ("tool", "T")),
    ),
    "ShareGPT as JSON": (
        {"conversations": json.dumps(shared(("human", "Q"), ("chatgpt", "A")))},
        {},
        ASKED,
    ),
    "ShareGPT in messages": ({"messages": shared(("user", "Q"), ("assistant", "A"))}, {}, ASKED),
    "ShareGPT with a call": (
        {
            "conversations": shared(
                ("human", "Q"),
                ("function_call", '{"name": "f", "arguments": {"a": 1}}'),
                ("observation", "T"),
                ("gpt", "A"),
            )
        },
        {},
        [
            *said(("user", "Q")),
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
                ],
            },
            *said(("tool", "T"), ("assistant", "A")),
        ],
    ),
    "conversations of messages": ({"conversations": ASKED}, {}, ASKED),
    "the task's own columns first": ({"messages": ASKED, **ALPACA, "output": "B"}, {}, ASKED),
}


@pytest.mark.parametrize("layout", READ)
def test_layouts_are_read_as_messages(layout):
    row, columns, expected = READ[layout]
    encoder = ChatEncoder(
        DataConfig(source=["x"], task="supervised_finetuning", columns=Columns(**columns))
    )
    assert json.loads(encoder.read(row).text) == expected


REFUSED = {
    "an unknown role": ({"conversations": shared(("narrator", "Q"))}, {}, "role 'narrator'"),
    "no answer": ({"conversations": shared(("human", "Q"))}, {}, "the assistant says nothing"),
    "an input that is no text": (ALPACA | {"input": 5}, {}, "input is int, not text"),
    "a completion that nobody learns": (
        {"prompt": "Q", "completion": [{**ASKED[1], "weight": 0}]},
        {},
        "weight or train leaves nothing to learn",
    ),
    "an input beside messages": (
        {"prompt": ASKED[:1], "completion": "A", "more": "I"},
        {"input": "more"},
        "more has text, but prompt is a list",
    ),
    "columns that are named": (ALPACA, {"prompt": "question"}, "messages is absent"),
    "an empty output": (ALPACA | {"output": " "}, {}, "output is empty"),
}


@pytest.mark.parametrize("layout", REFUSED)
def test_what_cannot_be_read_is_named(layout):
    row, columns, message = REFUSED[layout]
    encoder = ChatEncoder(
        DataConfig(source=["x"], task="supervised_finetuning", columns=Columns(**columns))
    )
    with pytest.raises(Defect) as caught:
        encoder.read(row)
    assert message in caught.value.detail


def asked(number):
    return sentence(number), sentence(number + 1000)


def test_a_detected_layout_trains_the_same_rows_and_is_reported(tmp_path, configure):
    plain, alpaca, sharegpt = [], [], []
    for number in range(COUNT):
        prompt, answer = asked(number)
        plain.append({"messages": said(("user", prompt), ("assistant", answer))})
        rows = {"instruction": prompt, "input": "", "output": answer, "id": f"no. {number}"}
        alpaca.append(rows)
        sharegpt.append({"conversations": shared(("human", prompt), ("gpt", answer))})
    found = {}
    for name, rows in {"plain": plain, "alpaca": alpaca, "sharegpt": sharegpt}.items():
        path = write_jsonl(tmp_path / f"{name}.jsonl", rows)
        config = configure(path, run_name=name, task="supervised_finetuning", long_records="window")
        record = run(config)
        events = read_events(Workspace.of(config).events)
        warned = [event.message for event in events if isinstance(event, Warned)]
        card = json.loads(record.path("card.json").read_text())
        found[name] = side_rows(record, "train")
        layout = {
            "alpaca": "Alpaca (instruction, input, output)",
            "sharegpt": "ShareGPT (conversations)",
        }.get(name)
        assert card["layouts"] == ({layout: COUNT} if layout else {})
        assert [message for message in warned if "read as" in message] == (
            [
                f"60 records are read as {layout}; if that is wrong, name their columns in "
                "data.columns"
            ]
            if layout
            else []
        )
        assert card["unused"] == ({"id": COUNT} if name == "alpaca" else {})
        task, reason = find_task(str(path), [])
        assert task == "supervised_finetuning"
        assert (f"read as {layout}" in reason) == bool(layout)
    assert found["plain"] == found["alpaca"] == found["sharegpt"]


UNUSED = {
    "advice that loses the context": (
        {"question": "Q", "context": "I", "answer": "A"},
        {
            "task": "supervised_finetuning",
            "columns": {"prompt": "question", "completion": "answer"},
            "long_records": "window",
        },
        {"context"},
    ),
    "two texts, one class": (
        {"premise": "P", "hypothesis": "H", "label": "yes", "score": 5, "note": " ", "tags": []},
        {"task": "sequence_classification", "columns": {"text": "premise"}},
        {"hypothesis"},
    ),
    "named columns are used": (
        {"text": "Q", "author": "x", "topic": "y", "url": "z", "meta": {"a": "b"}},
        {"columns": {"group": "author", "slice": "topic"}},
        {"url", "meta"},
    ),
}


@pytest.mark.parametrize("case", UNUSED)
def test_columns_that_nothing_reads_are_listed(tmp_path, configure, case):
    row, data, expected = UNUSED[case]
    own = next(iter(row))
    varied = {"label": lambda n: "ab"[n % 2], "author": lambda n: f"writer {n}", own: sentence}
    rows = [
        {name: varied.get(name, lambda _, same=value: same)(n) for name, value in row.items()}
        for n in range(COUNT)
    ]
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    config = configure(path, **data)
    record = run(config)
    card = json.loads(record.path("card.json").read_text())
    assert card["unused"] == dict.fromkeys(expected, COUNT)
    events = read_events(Workspace.of(config).events)
    finished = next(event for event in events if isinstance(event, StepFinished))
    listed = f"not used: {', '.join(f'{name} (60 records)' for name in row if name in expected)}"
    assert listed in finished.summary
    page = record.path("card.html").read_text()
    assert all(f"60 {name}" in page for name in expected)
    columns = [f"data.columns.{name}={value}" for name, value in data["columns"].items()]
    for task in ([], [f"data.task={config.data.task}"]):
        assert listed in find_task(str(path), [*columns, *task])[1]


def test_an_encoder_that_reads_the_whole_row_uses_all_columns(configure):
    class Whole:
        tokenizer = None

        def read(self, row):
            return open_encoder(DataConfig(source=["x"])).read(dict(row))

    use = ColumnUse(DataConfig(source=["x"]), Whole())
    use.count({"text": "a", "more": "b"})
    assert not use.unused


def test_what_is_unused_depends_on_the_columns_that_are_not_null():
    config = DataConfig(source=["x"], task="supervised_finetuning")
    use = ColumnUse(config, open_encoder(config))
    asked = {"prompt": "Q", "completion": "A"}
    rows = [asked | {"messages": None}, asked | {"messages": ASKED}, asked | {"messages": None}]
    for row in rows:
        use.count(row | {"note": "", "more": "x"})
    assert use.unused == {"prompt": 1, "completion": 1, "more": 3}
