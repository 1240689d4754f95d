"""Encode pairs of answers as two sequences in one row, and answers marked as good or bad as one."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, ClassVar, Final, Self

import numpy as np
import pyarrow as pa

from steadytrain.components.shared.config import DataConfig
from steadytrain.components.shared.config.data_fields import LongRecords
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.tasks.encoding.base import (
    Content,
    EncodedRecord,
    EncodedRow,
    Fitted,
    TokenizerSettings,
)
from steadytrain.components.tasks.encoding.chat import ChatEncoder
from steadytrain.components.tasks.encoding.fields import Defect, score_of
from steadytrain.components.tasks.encoding.messages import (
    Message,
    check_learned,
    messages_in,
    opening,
    text_of_messages,
    texts_of,
    tools_of,
    written,
)
from steadytrain.components.tasks.encoding.tokens import (
    Encoded,
    cached_tokenizer,
    encode_chat,
    rows_of,
)

ANSWERS: Final = ("chosen", "rejected")
COMPLETION: Final = ("completion",)
_TIE: Final = re.compile(r"(is_|winner_)?tie[sd]?", re.IGNORECASE)
_WINNER: Final = re.compile(r"winner|preference|preferred|better", re.IGNORECASE)
COLUMNS: Final[dict[str, pa.DataType]] = {
    "input_ids": pa.list_(pa.int32()),
    "targets": pa.list_(pa.int8()),
    "lengths": pa.list_(pa.int32()),
}


def _texts(content: str) -> Sequence[str]:
    pair = json.loads(content)
    messages = [message for part in ("prompt", *ANSWERS) for message in pair[part]]
    return [text for message in messages for text in texts_of(message)]


def _prompt_and_answers(content: str) -> tuple[str, ...]:
    """Return the text of the prompt without the system message, and of each answer."""
    pair = json.loads(content)
    return tuple(text_of_messages(pair[part]) for part in ("prompt", *ANSWERS))


@dataclass(frozen=True)
class PreferenceEncoder:
    """Records with a prompt and two answers.

    A row has the shape of a packed one with two documents: the prompt with the preferred answer,
    and the prompt with the other one. Targets are the answers' tokens.
    """

    data: DataConfig

    schema = pa.schema(COLUMNS)
    packed = False
    labeled = False
    tokenizer = TokenizerSettings(
        _texts,
        special=ChatEncoder.tokenizer.special,
        chat_template=ChatEncoder.tokenizer.chat_template,
        compared=_prompt_and_answers,
        documents=ANSWERS,
    )

    def columns(self) -> Sequence[Sequence[str]]:
        columns = self.data.columns
        answers = [columns.chosen, columns.rejected]
        return [[columns.prompt, *answers], answers]

    def read(self, row: Mapping[str, Any]) -> Content:
        """Return prompt and answers, each a list of messages, as canonical JSON."""
        columns, unread = self.data.columns, Counter[str]()
        chosen = messages_in(row, columns.chosen, "assistant", unread)
        rejected = messages_in(row, columns.rejected, "assistant", unread)
        # What two whole conversations begin with is the prompt.
        shared = [both[0] for both in takewhile(_alike, zip(chosen, rejected, strict=False))]
        prompt = whole = shared
        if row.get(columns.prompt) is not None:
            prompt = messages_in(row, columns.prompt, "user", unread)
            whole = _whole_prompt(prompt, shared)
        if whole:
            prompt, chosen, rejected = whole, chosen[len(shared) :], rejected[len(shared) :]
        if chosen == rejected:
            raise Defect("wrong_type", f"{columns.chosen} and {columns.rejected} are equal")
        if not prompt:
            raise Defect("missing_field", f"{columns.prompt} is absent or null")
        for column, answer in ((columns.chosen, chosen), (columns.rejected, rejected)):
            check_learned(answer, f"in {column}, ")
        if not whole and any(starts_conversation(answer, prompt) for answer in (chosen, rejected)):
            raise Defect(
                "prompt_mismatch",
                f"{columns.prompt} is not what {columns.chosen} and {columns.rejected} begin with",
            )
        content: dict[str, Any] = {"prompt": prompt, "chosen": chosen, "rejected": rejected}
        if tools := tools_of(row.get(columns.tools), columns.tools):
            content["tools"] = tools
        return Content(written(content), prompt=opening(prompt), unread=unread)

    def check_unjudged(self, row: Mapping[str, Any], used: Container[str | None]) -> None:
        """Check that no other column says that the chosen answer is not the better one.

        Equal scores do not say so.

        Args:
            used: columns that the configuration names.

        Raises:
            Defect: one does.
        """
        answers = self.data.columns.chosen, self.data.columns.rejected
        for column, value in row.items():
            if column in used or column in answers or value is None:
                continue
            verdict = str(value)[:40].strip().casefold()
            tie = _TIE.fullmatch(column) and verdict in ("true", "1", "yes")
            other = column.replace(*answers, 1)
            kind = column.replace(answers[0], "", 1).strip("-_. ")
            high, low = score_of(kind, value), score_of(kind, row.get(other))
            if tie or (_WINNER.fullmatch(column) and verdict.startswith(("tie", answers[1]))):
                raise Defect("contradicted", f"{column[:80]} is {verdict}")
            if other != column and high is not None and low is not None and high < low:
                named = f"{column[:80]} is {value}, less than {other[:80]}, which is {row[other]}"
                raise Defect("contradicted", named)

    def test_columns(self, records: pa.Table) -> Mapping[str, Any]:
        return {"messages": prompts_of(records), "pair": records["content"]}

    def row_encoder(self, fitted: Fitted) -> PreferenceRows:
        return PreferenceRows.by(self.data, fitted)


@dataclass(frozen=True)
class PreferenceRows:
    """Encodes pairs with the tokenizer in a folder."""

    tokenizer: Path
    sequence_length: int
    long_records: LongRecords | None = None

    answers: ClassVar[Sequence[str]] = ANSWERS

    @classmethod
    def by(cls, data: DataConfig, fitted: Fitted) -> Self:
        assert fitted.tokenizer is not None
        return cls(fitted.tokenizer, data.sequence_length, data.fits_long_records)

    def encode(self, records: Sequence[Content]) -> list[EncodedRecord | Defect]:
        return [self._encode(record) for record in records]

    def _encode(self, record: Content) -> EncodedRecord | Defect:
        try:
            whole = encode_answers(cached_tokenizer(self.tokenizer), record.text, self.answers)
        except BadInput as error:
            return Defect("refused_by_template", error.message)
        if not all(any(document.targets) for document in whole):
            return Defect("refused_by_template", "it leaves nothing to predict")
        if _are_equal(whole):
            return Defect("printed_alike", "the chat template prints its answers alike")
        try:
            rows = [
                rows_of(document, self.sequence_length, self.long_records) for document in whole
            ]
        except Defect as defect:
            return defect
        cut = [first for first, *_ in rows]
        if _are_equal(cut):
            detail = f"its answers differ only after {self.sequence_length:,} tokens"
            return Defect("cut_to_nothing", f"{detail} (data.sequence_length)")
        values = {
            "input_ids": np.concatenate([np.array(each.input_ids, np.int32) for each in cut]),
            "targets": np.concatenate([np.array(each.targets, np.int8) for each in cut]),
            "lengths": np.array([len(each.input_ids) for each in cut], np.int32),
            **self._verdict(record.text),
        }
        return EncodedRecord(
            sum(len(document.input_ids) for document in whole),
            [EncodedRow(values, len(values["input_ids"]), targets=1)],
            truncated=cut != whole,
            ends=frozenset[int]().union(*(document.ends for document in whole)),
            unprinted=sum((Counter(document.unprinted) for document in whole), Counter[str]()),
        )

    def _verdict(self, _: str) -> dict[str, Any]:
        return {}


def _are_equal(answers: Sequence[Encoded]) -> bool:
    return len(answers) > 1 and answers[0] == answers[1]


def prompts_of(records: pa.Table) -> pa.Array[Any]:
    """Return the messages of each record's prompt, as JSON."""
    contents: list[Any] = records["content"].to_pylist()
    prompts = [json.dumps(json.loads(each)["prompt"], ensure_ascii=False) for each in contents]
    return pa.array(prompts, pa.string())


def encode_answers(tokenizer: Any, content: str, answers: Sequence[str]) -> list[Encoded]:
    """Return the prompt with each of the answers.

    Args:
        content: what `read` of the encoder returns as text.
        answers: their names in it.

    Raises:
        BadInput: the chat template rejects the messages.
    """
    record = json.loads(content)
    prompt, tools = record["prompt"], record.get("tools", ())
    chats = ([*prompt, *record[name]] for name in answers)
    return [encode_chat(tokenizer, chat, tools, len(prompt)) for chat in chats]


def _alike(both: tuple[Message, Message]) -> bool:
    return both[0] == both[1]


def _whole_prompt(prompt: list[Message], shared: list[Message]) -> list[Message]:
    """Return the prompt of two whole conversations; nothing if they do not include the prompt.

    Args:
        prompt: some turns of what they share, with or without the system message.
        shared: what both begin with.
    """
    system = [message for message in prompt if message["role"] == "system"]
    if not any(message["role"] == "system" for message in shared):
        shared = [*system, *shared]
    turns, places = _compared(prompt), range(len(shared) - len(prompt) + 1)
    occurs = any(_compared(shared)[index : index + len(turns)] == turns for index in places)
    return shared if occurs else []


def _compared(messages: list[Message]) -> list[Message]:
    return [{**message, "content": (message["content"] or "").strip()} for message in messages]


def starts_conversation(answer: list[Message], prompt: list[Message]) -> bool:
    """Return whether an answer cannot follow the prompt because it begins with a prompt itself."""
    first = answer[0]["role"]
    return bool(first == "system" or first == "user" == prompt[-1]["role"])


_VERDICTS: Final = {
    **dict.fromkeys(("true", "1", "+1"), True),
    **dict.fromkeys(("false", "0", "-1"), False),
}


def _texts_of_answer(content: str) -> Sequence[str]:
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
        _texts_of_answer,
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
        if starts_conversation(completion, prompt):
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
        return UnpairedPreferenceRows.by(self.data, fitted)


@dataclass(frozen=True)
class UnpairedPreferenceRows(PreferenceRows):
    """Encodes marked answers with the tokenizer in a folder."""

    answers = COMPLETION

    def _verdict(self, content: str) -> dict[str, Any]:
        return {"desirable": is_desirable(content)}


def is_desirable(content: str) -> bool:
    """Return whether the completion in a content is good."""
    return bool(json.loads(content)["desirable"])
