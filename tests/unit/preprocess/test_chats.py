"""Conversations with tools, thoughts and marked turns, from files to prepared rows."""

from __future__ import annotations

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from steadytrain.components.preprocess.folds import read_table
from steadytrain.components.preprocess.inputs import find_inputs
from steadytrain.components.preprocess.model import with_template
from steadytrain.components.preprocess.step import run
from steadytrain.components.shared.config import DataConfig, from_mapping
from steadytrain.components.shared.errors import BadInput, ConfigError
from steadytrain.components.shared.events import read_events
from steadytrain.components.shared.events.types import Warned
from steadytrain.components.shared.left_out import in_one_line
from steadytrain.components.shared.workspace import Workspace
from steadytrain.components.tasks.encoding.chat import ChatEncoder
from steadytrain.components.tasks.encoding.messages import chat_of
from steadytrain.components.tasks.encoding.preference import (
    ANSWERS,
    PreferenceEncoder,
    PreferenceRows,
    encode_answers,
)
from steadytrain.components.tasks.encoding.tokens import encode_record, load_tokenizer, scored_text

from support.data import sentence, write_jsonl
from support.templates import FAMILIES, family_tokenizer, plain


def schema(name, field):
    parameters = {"type": "object", "properties": {field: {"type": "string"}}}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = [schema("weather", "city"), schema("clock", "zone")]


def chat(seed, **more):
    """Return a chat with a call of one of two tools, which take different arguments."""
    name, field = [("weather", "city"), ("clock", "zone")][seed % 2]
    function = {"name": name, "arguments": {field: sentence(seed, 2)}}
    call = {"id": f"call{seed:05}", "type": "function", "function": function}
    messages = [
        {"role": "user", "content": sentence(seed + 1000, 5)},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": sentence(seed + 2000, 3), "tool_call_id": call["id"]},
        {"role": "assistant", "content": sentence(seed + 3000, 4), **more},
    ]
    return {"messages": messages, "tools": TOOLS}


@pytest.fixture
def tokens(tmp_path):
    """A folder with the tokenizer of a model that takes tools and thoughts."""
    tokenizer = family_tokenizer()
    tokenizer.chat_template = plain(FAMILIES["qwen3"])
    tokenizer.save_pretrained(tmp_path / "tokens")
    return tmp_path / "tokens"


def contents(path):
    data = DataConfig(source=[str(path)])
    rows = [
        row for part in find_inputs(data).chunks(data, path.parent) for _, _, row in part.rows()
    ]
    return [json.loads(ChatEncoder(data).read(row).text) for row in rows]


@pytest.mark.slow
def test_columns_of_one_type_hold_the_same_chats_as_lines(tmp_path):
    """In Parquet, each call has the arguments of all tools, null but for its own."""
    chats = [chat(seed) for seed in range(4)]
    table = pa.Table.from_pylist(chats)
    pq.write_table(table, tmp_path / "chats.parquet")
    assert contents(tmp_path / "chats.parquet") == chats
    # Polars writes lists as large lists.
    large = [pa.field(each.name, pa.large_list(each.type.value_type)) for each in table.schema]
    pq.write_table(table.cast(pa.schema(large)), tmp_path / "large.parquet")
    assert contents(tmp_path / "large.parquet") == chats
    assert contents(write_jsonl(tmp_path / "chats.jsonl", chats)) == chats


def test_calls_are_prepared_and_scored_as_they_are_encoded(tmp_path, tokens, configure):
    source = write_jsonl(tmp_path / "chats.jsonl", (chat(seed) for seed in range(60)))
    model = {"config": {"model_type": "gpt2"}, "tokenizer": str(tokens)}
    data = {"task": "supervised_finetuning", "sequence_length": 512, "long_records": "window"}
    found = run(configure(source, model=model, **data))
    tokenizer = load_tokenizer(found.path(found.tokenizer))
    held_out = read_table(found.path(found.test_records)).to_pylist()
    encoded = [encode_record(tokenizer, record) for record in held_out]
    targets = sum(sum(document.targets) for document in encoded)
    assert found.sides["test"].target_tokens == targets
    assert tokenizer.convert_ids_to_tokens(found.turn_ends) == ["<|im_end|>"]
    learned = tokenizer.decode(
        [
            token
            for one in encoded
            for token, target in zip(one.input_ids, one.targets, strict=True)
            if target
        ]
    )
    assert learned.count("<tool_call>") == len(held_out) > 5


def test_keys_of_messages_that_are_not_used_are_counted(tmp_path, configure):
    def row(seed):
        asked = {"role": "user", "content": sentence(seed, 6), "name": "Ann"}
        said = {"role": "assistant", "content": sentence(seed + 500, 6), "refusal": None}
        more = {"audio": {"id": "x"}, "bad\x1b[2Jname": 1} if seed % 2 else {}
        return {"messages": [asked, {**said, **more}]}

    # The last two are equal: both are read, and one is printed.
    source = write_jsonl(tmp_path / "chats.jsonl", [row(min(seed, 59)) for seed in range(61)])
    config = configure(source, task="supervised_finetuning", sequence_length=128)
    record = run(config)
    told = (
        "keys of messages that nothing reads: 31 audio, 31 bad [2Jname; "
        "keys of messages that the chat template does not print: 60 name"
    )
    card = json.loads(record.path("card.json").read_text(encoding="utf-8"))
    assert card["unread_keys"] == {"audio": 31, "bad\x1b[2Jname": 31}
    assert card["unprinted_keys"] == {"name": 60}
    assert in_one_line(record, card).endswith(f"; {told}")
    assert told in record.path("card.html").read_text(encoding="utf-8")
    events = read_events(Workspace.of(config).events)
    warned = [event.message for event in events if isinstance(event, Warned)]
    assert f"{told}; the model does not see their values" in warned


@pytest.mark.parametrize("train_on", [None, "last_turn", "all"])
def test_targets_are_those_that_are_asked_for(tmp_path, configure, train_on):
    """Evaluation scores what the assistant says, or what it says last."""
    rows = [{"messages": [
        {"role": role, "content": sentence(seed * 10 + turn, 4)}
        for turn, role in enumerate(["user", "assistant", "user", "assistant"])
    ]} for seed in range(60)]  # fmt: skip
    source = write_jsonl(tmp_path / "chats.jsonl", rows)
    task = "supervised_finetuning"
    found = run(configure(source, task=task, sequence_length=256, train_on=train_on))
    tokenizer = load_tokenizer(found.path(found.tokenizer))
    held_out = read_table(found.path(found.test_records)).to_pylist()
    scored = [scored_text(record) for record in held_out]
    said = [
        [message["content"] for message in chat_of(record["messages"])[0]] for record in held_out
    ]
    answers = [both[3] if train_on == "last_turn" else both[1] + both[3] for both in said]
    assert scored == answers
    targets = sum(sum(encode_record(tokenizer, record).targets) for record in held_out)
    test = found.sides["test"]
    assert test.target_tokens == (test.tokens - test.documents if train_on == "all" else targets)
    assert tokenizer.convert_ids_to_tokens(found.turn_ends) == ["<|endoftext|>"]


def test_another_choice_of_targets_moves_no_record_across_the_split(tmp_path, configure):
    rows = [{"messages": [
        {"role": role, "content": sentence(seed * 10 + turn, 4), "train": None if turn else False}
        for turn, role in enumerate(["user", "assistant", "user", "assistant"])
    ]} for seed in range(60)]  # fmt: skip
    source = write_jsonl(tmp_path / "chats.jsonl", rows)
    task = "supervised_finetuning"
    held_out = set()
    for train_on in (None, "last_turn", "all"):
        data = {"task": task, "sequence_length": 256, "train_on": train_on}
        found = run(configure(source, group_by_prompt=False, **data))
        held_out.add(frozenset(read_table(found.path(found.test_records))["id"].to_pylist()))
    assert len(held_out) == 1


def test_a_chat_template_is_that_of_the_configuration(tmp_path, tokens, configure):
    """A file's content counts: an edit prepares the data again, and its text is the same."""
    rows = [{"prompt": sentence(n, 4), "completion": sentence(n + 500, 4)} for n in range(60)]
    source, given = write_jsonl(tmp_path / "rows.jsonl", rows), tmp_path / "own.jinja"
    model = {"config": {"model_type": "gpt2"}, "tokenizer": str(tokens)}
    family, other = plain(FAMILIES["llama3"]), plain(FAMILIES["gemma"])

    def prepared(template):
        chat = {"task": "supervised_finetuning", "chat_template": str(template)}
        return run(configure(source, model=model, sequence_length=128, **chat))

    given.write_text(f"{family}\n")
    found = prepared(given)
    tokenizer = load_tokenizer(found.path(found.tokenizer))
    expected = load_tokenizer(tokens)
    for record in read_table(found.path(found.test_records)).to_pylist():
        messages = chat_of(record["messages"])[0]
        ids = expected.apply_chat_template(messages, chat_template=family, return_dict=False)
        assert encode_record(tokenizer, record).input_ids == ids
    assert tokenizer.convert_ids_to_tokens(found.turn_ends) == ["<|eot_id|>"]
    assert prepared(given).fingerprint == found.fingerprint
    given.write_text(other)
    edited = prepared(given)
    assert load_tokenizer(edited.path(edited.tokenizer)).chat_template == other
    assert prepared(other).folder == edited.folder


@pytest.mark.parametrize(
    ("given", "content", "told"),
    [
        ("absent.jinja", None, "cannot be used: No such file or directory"),
        ("text.jinja", "hello", "it has neither"),
        ("latin.jinja", b"{{ '\xe9' }}", "cannot be used: 'utf-8' codec"),
        (
            "open.jinja",
            b"{% for m in messages %}\n{{ m.content }",
            "cannot be used: line 2: unexpected",
        ),
    ],
)
def test_a_file_without_a_template_is_an_error(tmp_path, configure, given, content, told):
    path = tmp_path / given
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    source = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "a", "completion": "b"}])
    config = configure(source, task="supervised_finetuning", chat_template=str(path))
    with pytest.raises(BadInput, match=told) as raised:
        run(config)
    assert raised.value.message.startswith("data.chat_template")


def test_chatml_is_a_template_by_name(configure):
    config = configure("x", task="supervised_finetuning", chat_template="chatml")
    tokenizer = family_tokenizer()
    tokenizer.chat_template = with_template(config).data.chat_template
    said = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "so"}]
    assert tokenizer.apply_chat_template(said, tokenize=False) == (
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nso<|im_end|>\n"
    )
    other = configure("x", task="supervised_finetuning", chat_template="vicuna")
    with pytest.raises(BadInput, match=r"data\.chat_template = 'vicuna' cannot be used") as raised:
        with_template(other)
    assert raised.value.remedy.endswith("or a name: chatml")


def test_only_tasks_with_chats_have_a_template(configure):
    with pytest.raises(ConfigError, match=r"data\.chat_template = .* causal_lm has no chats"):
        run(configure("x", chat_template="{{ messages }}"))
    with pytest.raises(ConfigError, match="give a file, or the template itself"):
        configure("x", task="supervised_finetuning", chat_template="s3://a/b.jinja")


def test_only_chats_choose_their_targets():
    model = {"config": {"model_type": "gpt2"}, "vocab_size": 400}
    data = {"source": ["x"], "task": "causal_lm", "train_on": "all"}
    with pytest.raises(ConfigError, match=r"data\.train_on = 'all': causal_lm has its own targets"):
        from_mapping({"name": "x", "output": "o", "model": model, "data": data})


def test_keys_of_a_pair_are_counted_in_prompt_and_answers(tokens):
    asked = {"role": "user", "content": "why", "name": "Ann", "vote": 1}
    row = {"prompt": [asked]} | {
        column: [{"role": "assistant", "content": column, "vote": 2}] for column in ANSWERS
    }
    content = PreferenceEncoder(DataConfig(source=["x"], task="preference")).read(row)
    assert content.unread == {"vote": 3}
    (found,) = PreferenceRows(tokens, 64).encode([content])
    assert found.unprinted == {"name": 2}


def test_pairs_have_tools(tokens):
    record = chat(3)
    answers = {
        "chosen": record["messages"],
        "rejected": [*record["messages"][:3], {"role": "assistant", "content": "no"}],
    }
    content = PreferenceEncoder(DataConfig(source=["x"], task="preference")).read(
        {**answers, "tools": TOOLS}
    )
    tokenizer = load_tokenizer(tokens)
    chosen, rejected = encode_answers(tokenizer, content.text, ANSWERS)
    for document, messages in ((chosen, answers["chosen"]), (rejected, answers["rejected"])):
        whole = tokenizer.apply_chat_template(messages, tools=TOOLS, return_dict=False)
        assert document.input_ids == whole
    said = [
        token for token, target in zip(rejected.input_ids, rejected.targets, strict=True) if target
    ]
    assert tokenizer.decode(said) == "no<|im_end|>"
