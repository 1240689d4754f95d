"""From text and chats to tokens, and which of them are to be predicted.

Preprocessing and evaluation both use this, so that a model is judged on exactly
the targets it was trained on. Nothing here needs torch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from steadytrain.components.shared.errors import BadInput

Message = Mapping[str, str]
"""One turn of a chat: `role` and `content`."""

DEFAULT_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|{{ message['role'] }}|>\n{{ message['content'] }}{{ eos_token }}\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
"""For tokenizers that bring none; a turn ends with the end-of-text token."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """A document in tokens.

    input_ids: the tokens.
    targets: of equal length; 1 where the token is to be predicted from those before it.
    """

    input_ids: list[int]
    targets: list[int]


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer of a folder, as Transformers' fast tokenizer.

    Raises:
        BadInput: the folder holds no tokenizer that can be read.
    """
    from transformers import PreTrainedTokenizerFast

    try:
        # tokenizer.json is complete in itself; AutoTokenizer would import torch for it.
        if (folder / "tokenizer.json").is_file():
            return PreTrainedTokenizerFast.from_pretrained(folder)
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise BadInput(
            f"{folder}: no tokenizer can be read there ({type(error).__name__})",
            remedy="give a folder with tokenizer.json and tokenizer_config.json, or set "
            "model.tokenizer",
        ) from error


def encode_text(tokenizer: Any, text: str) -> Encoded:
    """A document of plain text: begin, its tokens, end. All but the first are targets.

    Names of special tokens within the text are encoded as the text they are.

    Raises:
        BadInput: the tokenizer has no token for the end of a text.
    """
    return encode_texts(tokenizer, [text])[0]


def encode_texts(tokenizer: Any, texts: Sequence[str]) -> list[Encoded]:
    """Many documents at once: `encode_text` of each."""
    end = _end_of_text(tokenizer)
    begin = end if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    encoded = _plain_tokens(tokenizer, texts)
    return [Encoded([begin, *ids, end], [0] + [1] * (len(ids) + 1)) for ids in encoded]


def _plain_tokens(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    """Tokens of texts, special tokens neither added nor recognised.

    The tokenizers library is asked directly: it leaves out the offsets, which
    take as long as the tokens.
    """
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    before, backend.encode_special_tokens = backend.encode_special_tokens, True
    try:
        encodings = backend.encode_batch_fast(list(texts), add_special_tokens=False)
    finally:
        backend.encode_special_tokens = before
    return [encoding.ids for encoding in encodings]


def encode_chat(tokenizer: Any, messages: Sequence[Message]) -> Encoded:
    """A chat by the tokenizer's own template (DEFAULT_CHAT_TEMPLATE where it has none).

    Targets are the tokens of what the assistant says, with what ends its turn.

    Raises:
        BadInput: the template refuses these messages, or rewrites them beyond recognition.
    """
    text = _render(tokenizer, messages)
    spans = _assistant_spans(tokenizer, messages, text)
    encoded = tokenizer(
        text,
        add_special_tokens=False,
        return_offsets_mapping=True,
        return_attention_mask=False,
        return_token_type_ids=False,
        verbose=False,
    )
    ids, offsets = encoded["input_ids"], encoded["offset_mapping"]
    special = set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)
    targets = [0] * len(ids)
    for start, end in spans:
        end = _end_of_turn(text, end, ids, offsets, special)
        for index, (low, high) in enumerate(offsets):
            if low < end and max(high, low + 1) > start:
                targets[index] = 1
    if targets:
        targets[0] = 0
    return Encoded(ids, targets)


def windows(encoded: Encoded, length: int) -> list[Encoded]:
    """Consecutive windows of at most `length` tokens (2 or more).

    Neighbours share exactly one token, which gives the later window its first
    context and is a target in the earlier one only: each target is predicted once.
    """
    if length < 2:
        raise ValueError(f"a window of {length} tokens has nothing to predict")
    found = [Encoded(encoded.input_ids[:length], encoded.targets[:length])]
    for start in range(length - 1, len(encoded.input_ids) - 1, length - 1):
        ids, targets = (
            part[start : start + length] for part in (encoded.input_ids, encoded.targets)
        )
        found.append(Encoded(ids, [0, *targets[1:]]))
    return found


def encode_record(tokenizer: Any, record: Mapping[str, Any]) -> Encoded:
    """A raw record: of `messages` (a list, or the JSON of one) or of `text`."""
    if record.get("messages") is not None:
        return encode_chat(tokenizer, _messages(record))
    return encode_text(tokenizer, record["text"])


def scored_bytes(record: Mapping[str, Any]) -> int:
    """UTF-8 bytes of what is predicted in a raw record, the same for any tokenizer.

    Of a chat it is what the assistant says; otherwise the whole text.
    """
    if record.get("messages") is not None:
        said = (item["content"] for item in _messages(record) if item["role"] == "assistant")
        return sum(len(content.encode()) for content in said)
    return len(record["text"].encode())


def _messages(record: Mapping[str, Any]) -> list[dict[str, str]]:
    messages = record["messages"]
    loaded: list[dict[str, str]] = json.loads(messages) if isinstance(messages, str) else messages
    return loaded


def _end_of_text(tokenizer: Any) -> int:
    end: int | None = tokenizer.eos_token_id
    if end is None:
        raise BadInput(
            "the tokenizer has no end-of-text token (eos_token), which a language model needs",
            remedy="take the tokenizer of a causal language model, or set its eos_token",
        )
    return end


def _render(tokenizer: Any, messages: Iterable[Message]) -> str:
    template = None if tokenizer.chat_template else DEFAULT_CHAT_TEMPLATE
    if template:
        _end_of_text(tokenizer)
    try:
        return str(
            tokenizer.apply_chat_template(
                [dict(message) for message in messages], tokenize=False, chat_template=template
            )
        )
    except Exception as error:
        # A template may raise anything: its refusals are Jinja errors, its slips any other.
        raise BadInput(
            f"the tokenizer's chat template refuses the messages: {error}",
            remedy="check the roles and their order, or take another chat template",
        ) from error


def _assistant_spans(
    tokenizer: Any, messages: Sequence[Message], text: str
) -> list[tuple[int, int]]:
    """Where in the rendered text the assistant's contents stand.

    The template is rendered once more with marks for the contents; what lies
    between the marks is the template's own, the rest of `text` the contents.
    """
    marks = [f"\ue000{index}\ue001" for index in range(len(messages))]
    marked = [{**item, "content": mark} for item, mark in zip(messages, marks, strict=True)]
    own = re.split("|".join(marks), _render(tokenizer, marked)) if marks else [text]
    contents = [item["content"] for item in messages]
    if len(own) == len(contents) + 1:
        spans = _join_spans(own, contents, text) or _match_spans(own, text)
        if spans:
            pairs = zip(messages, spans, strict=True)
            return [span for item, span in pairs if item["role"] == "assistant"]
    raise BadInput(
        "the tokenizer's chat template rewrites the messages, so that what the assistant "
        "says cannot be told from the rest",
        remedy="take a chat template that prints each message's content once, in order",
    )


def _join_spans(own: list[str], contents: list[str], text: str) -> list[tuple[int, int]]:
    """Spans of contents that the template prints as they are; empty where it does not."""
    spans, position = [], 0
    for before, content in zip(own, contents, strict=False):
        position += len(before)
        spans.append((position, position + len(content)))
        position += len(content)
    rebuilt = "".join(part for pair in zip(own, [*contents, ""], strict=True) for part in pair)
    return spans if rebuilt == text else []


def _match_spans(own: list[str], text: str) -> list[tuple[int, int]]:
    """Spans of contents that the template trims or changes."""
    match = re.fullmatch("(.*?)".join(map(re.escape, own)), text, re.DOTALL)
    return [match.span(index) for index in range(1, len(own))] if match else []


def _end_of_turn(
    text: str, end: int, ids: list[int], offsets: list[tuple[int, int]], special: set[int]
) -> int:
    """The end of a content's span, moved past the special token that ends the turn."""
    for token, (low, high) in zip(ids, offsets, strict=True):
        if low >= end and token in special:
            return high if not text[end:low].strip() else end
    return end
