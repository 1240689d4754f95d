"""Encode answers that are marked as good or bad, each with its prompt, one row each."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa

from steadytrain.components.shared.config import DataConfig
from steadytrain.components.shared.config.data import LongRecords
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.tasks.encoding.base import (
    Content,
    EncodedRecord,
    EncodedRow,
    Fitted,
    TokenizerSettings,
)
from steadytrain.components.tasks.encoding.chat import ChatEncoder
from steadytrain.components.tasks.encoding.fields import Defect
from steadytrain.components.tasks.encoding.messages import (
    check_learned,
    messages_in,
    opening,
    text_of_messages,
    texts_of,
    tools_of,
    written,
)
from steadytrain.components.tasks.encoding.preference import COLUMNS, is_whole, prompts_of
from steadytrain.components.tasks.encoding.tokens import (
    Encoded,
    cached_tokenizer,
    encode_chat,
    rows_of,
)

_VERDICTS: Final = {
    **dict.fromkeys(("true", "1", "+1"), True),
    **dict.fromkeys(("false", "0", "-1"), False),
}


def _texts(content: str) -> Sequence[str]:
    record = json.loads(content)
    messages = [*record["prompt"], *record["completion"]]
    return [text for message in messages for text in texts_of(message)]


def _prompt_answer_and_verdict(content: str) -> tuple[str, ...]:
    """Return what near duplicates share: a good and a bad mark of one answer are none."""
    record = json.loads(content)
    return (
        text_of_messages(record["prompt"]),
        text_of_messages(record["completion"]),
        str(record["desirable"]),
    )


@dataclass(frozen=True)
class UnpairedPreferenceEncoder:
    """Records with a prompt, a completion, and whether it is good.

    A row has the shape of a packed one with one document. Targets are the completion's tokens.
    """

    data: DataConfig

    schema = pa.schema({**COLUMNS, "desirable": pa.bool_()})
    packed = False
    labeled = False
    tokenizer = TokenizerSettings(
        _texts,
        special=ChatEncoder.tokenizer.special,
        chat_template=ChatEncoder.tokenizer.chat_template,
        compared=_prompt_answer_and_verdict,
    )

    def columns(self) -> Sequence[Sequence[str]]:
        columns = self.data.columns
        return [[columns.prompt, columns.completion, columns.label]]

    def read(self, row: Mapping[str, Any]) -> Content:
        """Return prompt and completion, each a list of messages, and the verdict, as JSON."""
        columns, unread = self.data.columns, Counter[str]()
        prompt = messages_in(row, columns.prompt, "user", unread)
        completion = messages_in(row, columns.completion, "assistant", unread)
        check_learned(completion, f"in {columns.completion}, ")
        if is_whole(completion, prompt):
            raise Defect(
                "prompt_mismatch", f"{columns.completion} is a whole conversation, not an answer"
            )
        content: dict[str, Any] = {
            "prompt": prompt,
            "completion": completion,
            "desirable": self._verdict(row),
        }
        if tools := tools_of(row.get(columns.tools), columns.tools):
            content["tools"] = tools
        return Content(written(content), prompt=opening(prompt), unread=unread)

    def _verdict(self, row: Mapping[str, Any]) -> bool:
        column = self.data.columns.label
        value = row.get(column)
        if value is None:
            raise Defect("missing_field", f"{column} is absent or null")
        verdict = _VERDICTS.get(str(value).strip().casefold())
        if verdict is None:
            raise Defect("wrong_type", f"{column} is {str(value)[:80]!r}, not true or false")
        return verdict

    def test_columns(self, records: pa.Table) -> Mapping[str, Any]:
        return {"messages": prompts_of(records), "answer": records["content"]}

    def row_encoder(self, fitted: Fitted) -> UnpairedPreferenceRows:
        assert fitted.tokenizer is not None
        return UnpairedPreferenceRows(
            fitted.tokenizer, self.data.sequence_length, self.data.fits_long_records
        )


@dataclass(frozen=True)
class UnpairedPreferenceRows:
    """Encodes marked answers with the tokenizer in a folder."""

    tokenizer: Path
    sequence_length: int
    long_records: LongRecords | None = None

    def encode(self, records: Sequence[Content]) -> list[EncodedRecord | Defect]:
        return [self._encode(record) for record in records]

    def _encode(self, record: Content) -> EncodedRecord | Defect:
        try:
            whole = encode_answer(cached_tokenizer(self.tokenizer), record.text)
        except BadInput as error:
            return Defect("refused_by_template", error.message)
        if not any(whole.targets):
            return Defect("refused_by_template", "it leaves nothing to predict")
        try:
            (row,) = rows_of(whole, self.sequence_length, self.long_records)
        except Defect as defect:
            return defect
        values = {
            "input_ids": np.array(row.input_ids, np.int32),
            "targets": np.array(row.targets, np.int8),
            "lengths": np.array([len(row.input_ids)], np.int32),
            "desirable": is_desirable(record.text),
        }
        return EncodedRecord(
            len(whole.input_ids),
            [EncodedRow(values, len(row.input_ids), targets=1)],
            truncated=row != whole,
            ends=whole.ends,
            unprinted=whole.unprinted,
        )


def encode_answer(tokenizer: Any, content: str) -> Encoded:
    """Return the prompt with the completion.

    Args:
        content: what `UnpairedPreferenceEncoder.read` returns as text.

    Raises:
        BadInput: the chat template rejects the messages.
    """
    record = json.loads(content)
    prompt, tools = record["prompt"], record.get("tools", ())
    return encode_chat(tokenizer, [*prompt, *record["completion"]], tools, len(prompt))


def is_desirable(content: str) -> bool:
    """Return whether the completion in a content is good."""
    return bool(json.loads(content)["desirable"])
