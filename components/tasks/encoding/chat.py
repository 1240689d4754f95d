"""Encode conversations as windows of tokens, of which the assistant's are predicted."""

from __future__ import annotations

import json
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from itertools import dropwhile, takewhile
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa

from steadytrain.components.shared.config import DataConfig
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.tasks.encoding.base import (
    Content,
    EncodedRecord,
    Fitted,
    TokenizerSettings,
)
from steadytrain.components.tasks.encoding.fields import STRICT_JSON, Defect, is_judgment, text_of
from steadytrain.components.tasks.encoding.plain_text import WINDOWS, window_row
from steadytrain.components.tasks.encoding.tokens import (
    DEFAULT_CHAT_TEMPLATE,
    encode_chat,
    kept_tokenizer,
    windows,
)

_ROLES: Final = ("system", "user", "assistant", "tool")


def _messages(content: str) -> Sequence[str]:
    return [item["content"] for item in json.loads(content)]


def prompt_and_answer(content: str) -> tuple[str, str]:
    """Return what the others say in a chat, and what the assistant says.

    System messages are left out: many chats have the same.
    """
    messages: list[dict[str, str]] = json.loads(content)
    answers = [message for message in messages if message["role"] == "assistant"]
    prompt = [message for message in messages if message["role"] != "assistant"]
    return said(prompt), said(answers)


def said(messages: Sequence[Mapping[str, str]]) -> str:
    """Return what is said in messages, except by the system."""
    return "\n".join(message["content"] for message in messages if message["role"] != "system")


def opening(messages: Sequence[Mapping[str, str]]) -> str | None:
    """Return what the others say before the first answer; None if nobody asks anything.

    Conversations that go on in different ways share it. System messages and a greeting by the
    assistant are left out: many chats have the same.
    """
    asked = dropwhile(lambda message: message["role"] in ("system", "assistant"), messages)
    return said([*takewhile(lambda message: message["role"] != "assistant", asked)]) or None


@dataclass(frozen=True)
class ChatEncoder:
    """Records with a conversation, or with a prompt and its completion."""

    data: DataConfig

    schema = WINDOWS
    packed = True
    labeled = False
    tokenizer = TokenizerSettings(
        _messages,
        special=tuple(f"<|{role}|>" for role in _ROLES),
        chat_template=DEFAULT_CHAT_TEMPLATE,
        compared=prompt_and_answer,
    )

    def columns(self) -> Sequence[Sequence[str]]:
        columns = self.data.columns
        return [[columns.messages], [columns.prompt, columns.completion]]

    def read(self, row: Mapping[str, Any]) -> Content:
        """Return the messages as canonical JSON."""
        columns = self.data.columns
        value = row.get(columns.messages)
        if value is None and (columns.prompt in row or columns.completion in row):
            messages = [
                {"role": "user", "content": text_of(row, columns.prompt)},
                {"role": "assistant", "content": text_of(row, columns.completion)},
            ]
        else:
            messages = [message_of(item) for item in turns_of(value, columns.messages)]
            if not any(item["role"] == "assistant" for item in messages):
                raise Defect("bad_messages", "the assistant says nothing")
        text = json.dumps(messages, ensure_ascii=False, separators=(",", ":"))
        return Content(text, prompt=opening(messages))

    def check_unjudged(self, row: Mapping[str, Any], used: Container[str | None]) -> None:
        """Check that no column says that a record may be bad.

        Args:
            used: columns that the configuration names.

        Raises:
            Defect: one does.
        """
        for column, value in row.items():
            if column not in used and is_judgment(column, value, self.data.columns.label):
                raise Defect("judged", f"{column[:80]} is {str(value)[:40]}")

    def test_columns(self, records: pa.Table) -> Mapping[str, Any]:
        return {"messages": records["content"]}

    def row_encoder(self, fitted: Fitted) -> ChatRows:
        assert fitted.tokenizer is not None
        return ChatRows(fitted.tokenizer, self.data.sequence_length)


@dataclass(frozen=True)
class ChatRows:
    """Encodes conversations with the tokenizer in a folder."""

    tokenizer: Path
    sequence_length: int

    def encode(self, records: Sequence[Content]) -> list[EncodedRecord | Defect]:
        return [self._encode(record) for record in records]

    def _encode(self, record: Content) -> EncodedRecord | Defect:
        try:
            encoded = encode_chat(kept_tokenizer(self.tokenizer), json.loads(record.text))
        except BadInput as error:
            return Defect("refused_by_template", error.message)
        found = windows(encoded, self.sequence_length)
        useful = [
            window_row(np.array(window.input_ids, np.int32), np.array(window.targets, np.int8))
            for window in found
            if any(window.targets)
        ]
        if not useful:
            return Defect("refused_by_template", "it leaves nothing to predict")
        skipped = len(found) - len(useful)
        return EncodedRecord(len(encoded.input_ids), useful, skipped, ends=encoded.ends)


def turns_of(value: Any, column: str) -> list[Any]:
    """Return the messages in a column, a list or its JSON, unchecked.

    Raises:
        Defect: there are none.
    """
    if isinstance(value, str):
        try:
            value = STRICT_JSON.decode(value)
        except (ValueError, RecursionError) as error:
            raise Defect("bad_messages", f"{column} is text that is not JSON") from error
    if value is None:
        raise Defect("missing_field", f"{column} is absent or null")
    if not isinstance(value, list):
        raise Defect("wrong_type", f"{column} is {type(value).__name__}, not a list")
    if not value:
        raise Defect("empty_field", f"{column} is empty")
    return value


def message_of(item: Any) -> dict[str, str]:
    """Return a message's role and content.

    Raises:
        Defect: it has no usable ones.
    """
    if not isinstance(item, Mapping) or not {"role", "content"} <= item.keys():
        raise Defect("bad_messages", "a message is not a mapping with role and content")
    role, content = item["role"], item["content"]
    if role not in _ROLES:
        raise Defect("bad_messages", f"role {str(role)[:40]!r} is not one of {', '.join(_ROLES)}")
    if not isinstance(content, str):
        raise Defect("wrong_type", f"content is {type(content).__name__}, not text")
    if role == "assistant" and not content.strip():
        raise Defect("bad_messages", "the assistant says nothing")
    return {"role": role, "content": content}
