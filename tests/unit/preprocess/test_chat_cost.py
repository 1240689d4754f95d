"""Limits on what a chat or a tokenizer's template may cost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from steadytrain.components.preprocess.model import train_tokenizer
from steadytrain.components.preprocess.validate import check
from steadytrain.components.shared import bounded
from steadytrain.components.shared.config import DataConfig
from steadytrain.components.shared.errors import BadInput, SteadytrainError
from steadytrain.components.tasks.encoding import tokens as encoding
from steadytrain.components.tasks.encoding.fields import NAME_BYTES, Defect
from steadytrain.components.tasks.encoding.labeled_text import LabeledTextEncoder
from steadytrain.components.tasks.encoding.plain_text import PlainTextEncoder
from steadytrain.components.tasks.encoding.tokens import encode_chat, load_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(
        ["hello world a b c"] * 5, PlainTextEncoder.tokenizer, vocab_size=300
    ).save_pretrained(folder)
    return load_tokenizer(folder)


@pytest.fixture
def template(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(bounded, "_overruns", 0)

    def use(text: str) -> Any:
        tokenizer.chat_template = text
        return tokenizer

    yield use
    tokenizer.chat_template = None


def chat(turns: int, content: str = "a") -> list[dict[str, str]]:
    pair = [{"role": "user", "content": content}, {"role": "assistant", "content": content}]
    return pair * turns


def test_unmatched_chat_is_rejected_in_bounded_work(template: Any) -> None:
    """With white space everywhere, a regular expression tries more splits than there are atoms."""
    trims = template(
        "{% for m in messages %} {{ m.content | trim }} {% endfor %}"
        "{% if messages[0].content | length > 9 %}x{% endif %}"
    )
    with pytest.raises(BadInput, match="rewrites"):
        encode_chat(trims, chat(100, " a" * 20))


class Counting(list[Any]):
    """A list that counts how often its items are read."""

    looks = 0

    def __getitem__(self, place: Any) -> Any:
        Counting.looks += 1
        return super().__getitem__(place)

    def __iter__(self) -> Any:
        for item in super().__iter__():
            Counting.looks += 1
            yield item


@pytest.mark.parametrize("turns", [100, 1000])
def test_work_is_linear_in_the_messages(turns: int) -> None:
    """Each message has four tokens: role, content, end, newline."""
    ids, offsets = Counting([0, 1, 2, 3] * turns), Counting()
    offsets += [(place, place + 1) for place in range(4 * turns)]
    spans = [(4 * turn + 1, 4 * turn + 2) for turn in range(turns)]
    Counting.looks = 0
    encoded = encoding._chosen("r.e\n" * turns, spans, ids, offsets, {2})
    assert encoded.targets == [0, 1, 1, 0] * turns
    assert encoded.ends == {2}
    assert Counting.looks < 40 * turns


def test_reordered_contents_keep_their_roles(template: Any) -> None:
    """Some templates put the system message into the user's last turn."""
    last = template(
        "{% for m in messages[1:] %}{{ m.role }}:{{ m.content | trim }}"
        "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}\n{% endfor %}"
        "{{ messages[0].content }}"
    )
    messages = [{"role": "system", "content": "c"}, *chat(1, " b")]
    encoded = encode_chat(last, messages)
    pairs = zip(encoded.input_ids, encoded.targets, strict=True)
    assert last.decode([token for token, target in pairs if target]) == "b<|endoftext|>"


@pytest.mark.slow
@pytest.mark.parametrize(
    "hostile",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{{ 'a' * 20000000000 }}",
        "{% set ns = namespace(x='aaaaaaaa') %}"
        "{% for a in range(40) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
        "{{ 9 ** (9 ** 9) }}",
    ],
)
def test_hostile_template_is_stopped(
    template: Any, hostile: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounded, "CPU_SECONDS", 0.5)
    with pytest.raises(BadInput, match="takes more than"):
        encode_chat(template(hostile), chat(1))
    monkeypatch.setattr(bounded, "CPU_SECONDS", 600.0)
    template("")
    assert encode_chat(template(None), chat(1)).input_ids


def test_endless_template_output_is_rejected(template: Any) -> None:
    prints = template("{% for a in range(90000) %}{{ 'a' * 100 }}{% endfor %}")
    with pytest.raises(BadInput, match="makes 9000000 characters of 2"):
        encode_chat(prints, chat(1))


def test_third_too_costly_record_ends_the_step(
    template: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounded, "CPU_SECONDS", 0.1)
    endless = template(
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    )
    for _ in range(2):
        with pytest.raises(BadInput, match="for one record"):
            encode_chat(endless, chat(1))
    with pytest.raises(SteadytrainError, match="for each of 3 records") as ended:
        encode_chat(endless, chat(1))
    assert not isinstance(ended.value, BadInput)


@pytest.mark.parametrize("column", ["label", "slice"])
def test_three_megabyte_name_is_a_defect(column: str) -> None:
    data = DataConfig(
        source=["x"],
        task="sequence_classification",
        columns={"label": "label", "group": "group", "slice": "slice"},
    )
    encoder = LabeledTextEncoder(data)
    row = {"text": "a", "label": "b", "group": "c", "slice": "d"}
    check(row | {column: "é" * (NAME_BYTES // 2)}, data, encoder)
    for large in ("a" * 3_000_000, "é" * (NAME_BYTES // 2 + 1)):
        with pytest.raises(Defect, match="too_long"):
            check(row | {column: large}, data, encoder)


@pytest.mark.slow
def test_many_small_records_make_many_chunks(tmp_path: Path) -> None:
    """A chunk is processed as a unit, with memory for each of its records."""
    from steadytrain.components.preprocess.formats import CHUNK_ROWS
    from steadytrain.components.preprocess.inputs import find_inputs

    count = 2 * CHUNK_ROWS + 5
    (tmp_path / "x.txt").write_text("".join(f"{number}\n" for number in range(count)))
    data = DataConfig(source=[str(tmp_path / "x.txt")])
    rows = [list(chunk.rows()) for chunk in find_inputs(data).chunks(data, tmp_path)]
    assert [len(chunk) for chunk in rows] == [CHUNK_ROWS, CHUNK_ROWS, 5]
    assert [line for chunk in rows for _, line, _ in chunk] == list(range(1, count + 1))
    for number in range(CHUNK_ROWS + 3):
        (tmp_path / f"{number}.py").write_text("a")
    data = DataConfig(source=[str(tmp_path)], format="source")
    sizes = [len(list(chunk.rows())) for chunk in find_inputs(data).chunks(data, tmp_path)]
    assert sizes == [CHUNK_ROWS, 3]


@pytest.mark.parametrize("content", ["," * 200 + "\n", '"' + "a\n" * 100])
def test_csv_record_that_is_too_long_is_a_defect_before_it_fills_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str
) -> None:
    from steadytrain.components.preprocess import tables
    from steadytrain.components.preprocess.inputs import find_inputs

    monkeypatch.setattr(tables, "LINE_LIMIT", 100)
    (tmp_path / "x.csv").write_text("text\n" + content + "good\n")
    data = DataConfig(source=[str(tmp_path / "x.csv")])
    rows = [row for chunk in find_inputs(data).chunks(data, tmp_path) for _, _, row in chunk.rows()]
    assert "a row of more than 100 characters" in rows[0].detail
    assert rows[-1] == {"text": "good"}
