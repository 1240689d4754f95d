"""Encode conversations as rows of tokens, of which the assistant's are predicted."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from steadytrain.components.shared.config import DataConfig
from steadytrain.components.shared.config.data_fields import LongRecords
from steadytrain.components.shared.config.data_sections import Columns
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.tasks.encoding.base import (
    Content,
    EncodedRecord,
    Fitted,
    TokenizerSettings,
)
from steadytrain.components.tasks.encoding.fields import Defect, is_judgment
from steadytrain.components.tasks.encoding.messages import (
    ROLES,
    Message,
    as_context,
    chat_of,
    check_learned,
    input_column,
    layout_of,
    layouts_for,
    messages_in,
    messages_of,
    only_last_turn,
    opening,
    text_of_messages,
    texts_of,
    tools_of,
    written,
)
from steadytrain.components.tasks.encoding.plain_text import WINDOWS, window_row
from steadytrain.components.tasks.encoding.printed import DEFAULT_CHAT_TEMPLATE
from steadytrain.components.tasks.encoding.tokens import cached_tokenizer, encode_chat, rows_of


def _texts(content: str) -> Sequence[str]:
    messages, tools = chat_of(content)
    described = [json.dumps(tool, ensure_ascii=False) for tool in tools]
    return [*described, *(text for message in messages for text in texts_of(message))]


def _as_json(messages: Sequence[Message], tools: Sequence[Any]) -> str:
    return written({"messages": messages, "tools": tools} if tools else messages)


def _without_mark(message: Message) -> Message:
    """Leave out a mark that only `data.train_on: all` reads."""
    if "train" not in message or message["role"] == "assistant":
        return message
    return {key: value for key, value in message.items() if key != "train"}


def prompt_and_answer(content: str) -> tuple[str, str]:
    """Return what the others say in a chat, and what the assistant says.

    System messages are left out: many chats have the same.
    """
    messages, _ = chat_of(content)
    answers = [message for message in messages if message["role"] == "assistant"]
    prompt = [message for message in messages if message["role"] != "assistant"]
    return text_of_messages(prompt), text_of_messages(answers)


@dataclass(frozen=True)
class ChatEncoder:
    """Records with a conversation, or with a prompt and its completion."""

    data: DataConfig

    schema = WINDOWS
    packed = True
    labeled = False
    tokenizer = TokenizerSettings(
        _texts,
        special=tuple(f"<|{role}|>" for role in ROLES),
        chat_template=DEFAULT_CHAT_TEMPLATE,
        compared=prompt_and_answer,
    )

    def columns(self) -> Sequence[Sequence[str]]:
        columns = self.data.columns
        more = [columns.input] if columns.input else []
        layouts = [[columns.messages], [columns.prompt, columns.completion, *more]]
        others = (layout.columns for layout in layouts_for(columns))
        return [*layouts, *([name for name in each.values() if name != "input"] for each in others)]

    def read(self, row: Mapping[str, Any]) -> Content:
        """Return the messages, with the tools if there are any, as canonical JSON."""
        columns, layout = self.data.columns, layout_of(row, self.data.columns)
        if layout is not None:
            columns = columns.model_copy(update=dict(layout.columns))
        train_on, context = self.data.train_on, 0
        value, unread = row.get(columns.messages), Counter[str]()
        whole = train_on == "all"
        if value is None and (columns.prompt in row or columns.completion in row):
            messages = _prompt(row, columns, unread, whole=whole)
            # Answers in the prompt are context.
            context = len(messages)
            messages += messages_in(row, columns.completion, "assistant", unread, whole=whole)
        else:
            messages = messages_of(value, columns.messages, unread, whole=whole)
        tools = tools_of(row.get(columns.tools), columns.tools)
        prompt, unmarked = opening(messages), messages
        if whole:
            unmarked = [_without_mark(message) for message in messages]
        else:
            messages = [*as_context(messages[:context]), *messages[context:]]
        if train_on == "last_turn":
            messages = only_last_turn(messages)
        check_learned(messages)
        # With another data.train_on, it is the same record, on the same side of the split.
        identity = None if unmarked == messages else _as_json(unmarked, tools)
        return Content(
            _as_json(messages, tools),
            prompt=prompt,
            identity=identity,
            unread=unread,
            layout=layout.name if layout else "",
        )

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
        return ChatRows(
            fitted.tokenizer,
            self.data.sequence_length,
            self.data.fits_long_records,
            whole=self.data.train_on == "all",
        )


@dataclass(frozen=True)
class ChatRows:
    """Encodes conversations with the tokenizer in a folder.

    whole: as for `encode_chat`.
    """

    tokenizer: Path
    sequence_length: int
    long_records: LongRecords | None = None
    whole: bool = False

    def encode(self, records: Sequence[Content]) -> list[EncodedRecord | Defect]:
        return [self._encode(record) for record in records]

    def _encode(self, record: Content) -> EncodedRecord | Defect:
        try:
            encoded = encode_chat(
                cached_tokenizer(self.tokenizer), *chat_of(record.text), whole=self.whole
            )
        except BadInput as error:
            return Defect("refused_by_template", error.message)
        if not any(encoded.targets):
            return Defect("refused_by_template", "it leaves nothing to predict")
        tokens, limit = len(encoded.input_ids), self.sequence_length
        try:
            cut_rows = rows_of(encoded, limit, self.long_records)
        except Defect as defect:
            return defect
        rows = [
            window_row(np.array(row.input_ids, np.int32), np.array(row.targets, np.int8))
            for row in cut_rows
        ]
        windowed = tokens > limit and self.long_records == "window"
        return EncodedRecord(
            tokens,
            rows,
            truncated=tokens > limit and not windowed,
            windowed=windowed,
            ends=encoded.ends,
            unprinted=encoded.unprinted,
        )


def _prompt(
    row: Mapping[str, Any], columns: Columns, unread: Counter[str], *, whole: bool
) -> list[Message]:
    """Return the messages before the completion."""
    messages = messages_in(row, columns.prompt, "user", unread, whole=whole)
    column = input_column(columns)
    more = row.get(column) if column else None
    if more is None or more == "":
        return messages
    if not isinstance(row.get(columns.prompt), str):
        raise Defect("wrong_type", f"{column} has text, but {columns.prompt} is a list of messages")
    if not isinstance(more, str):
        raise Defect("wrong_type", f"{column} is {type(more).__name__}, not text")
    return [{"role": "user", "content": f"{messages[0]['content']}\n{more}"}]
