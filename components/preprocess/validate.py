"""Check every record, and name what is wrong with a bad one.

A defect is the record's own fault and counts against `data.max_bad_share`. A record may also be
quarantined because of other records (a duplicate, a leak, a conflicting label). Such a record is
good, and does not count.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from steadytrain.components.preprocess.split import content_id
from steadytrain.components.shared.config import DataConfig

DEFECTS: Final = {
    "bad_encoding": "is not valid UTF-8",
    "bad_format": "cannot be read in the format of its file",
    "wrong_type": "a field has the wrong type or value",
    "missing_field": "a field is absent or null",
    "empty_field": "a field holds only white space",
    "bad_messages": "messages are not a chat with an assistant message",
    "unknown_label": "the label is not among data.labels",
    "too_long": "is longer than data.max_record_bytes, or a name in it than 1024 bytes",
    "refused_by_template": "the tokenizer's chat template rejects it",
    "label_unseen_in_training": "held out, with a label that training never saw",
}
SET_ASIDE: Final = {
    "exact_duplicate": "the same content as a record that is kept",
    "near_duplicate": "nearly the same content as another record of its side",
    "leakage": "a duplicate or near duplicate of a held-out record",
    "conflicting_label": "the same content occurs with another label",
}
NAME_BYTES: Final = 1024
"""Limit for a label, group or slice, because reports show it and it is held in memory."""
_ROLES = ("system", "user", "assistant", "tool")


class Defect(Exception):
    """Why a record cannot be used. `reason` is a key of DEFECTS."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(reason, detail)
        self.reason, self.detail = reason, detail


def _with_each_field_once(pairs: list[tuple[str, Any]]) -> dict[str, Any] | Defect:
    fields = dict(pairs)
    if len(fields) == len(pairs):
        return fields
    names = [name for name, _ in pairs]
    twice = next(name for name in names if names.count(name) > 1)
    return Defect("bad_format", f"the field {twice[:80]!r} appears twice")


STRICT_JSON: Final = json.JSONDecoder(object_pairs_hook=_with_each_field_once)
"""Decodes an object with a duplicate field to a Defect. Python would use the last value."""


@dataclass(frozen=True)
class Checked:
    """A good record. `content` is its text, or its messages as canonical JSON."""

    identity: bytes
    content: str
    label: str | None
    group: str | None
    slice: str | None


def check(row: Mapping[str, Any], data: DataConfig) -> Checked:
    """Return the record of a row.

    Raises:
        Defect: the first problem with the row.
    """
    columns = data.columns
    content = _chat(row, data) if data.task == "supervised_finetuning" else _text(row, columns.text)
    size = _utf8_size(content)
    if size > data.max_record_bytes:
        raise Defect("too_long", f"{size} bytes, {data.max_record_bytes} allowed")
    label = _label(row, data) if data.task == "sequence_classification" else None
    group = _scalar(row, columns.group) if columns.group else None
    part = _scalar(row, columns.slice) if columns.slice and row.get(columns.slice) != "" else None
    if columns.group and group is None:
        raise Defect("missing_field", f"{columns.group} (the group) is absent or null")
    return Checked(content_id(content), content, label, group, part)


def needed_columns(data: DataConfig) -> list[list[str]]:
    """Return alternative lists of columns. The data must have all columns of one of them."""
    columns = data.columns
    more = [column for column in (columns.group, columns.slice) if column]
    if data.task == "supervised_finetuning":
        return [[columns.messages, *more], [columns.prompt, columns.completion, *more]]
    if data.task == "sequence_classification":
        more = [columns.label, *more]
    return [[columns.text, *more]]


def _utf8_size(text: str) -> int:
    try:
        return len(text.encode())
    except UnicodeEncodeError as error:
        raise Defect("bad_encoding", "contains bytes or code points that are not UTF-8") from error


def _text(row: Mapping[str, Any], column: str) -> str:
    value = row.get(column)
    if value is None:
        raise Defect("missing_field", f"{column} is absent or null")
    if not isinstance(value, str):
        raise Defect("wrong_type", f"{column} is {type(value).__name__}, not text")
    if not value.strip():
        raise Defect("empty_field", f"{column} is empty")
    return value


def _label(row: Mapping[str, Any], data: DataConfig) -> str:
    column = data.columns.label
    label = _scalar(row, column)
    if label is None:
        raise Defect("missing_field", f"{column} is absent or null")
    if not label.strip():
        raise Defect("empty_field", f"{column} is empty")
    if data.labels is not None and label not in data.labels:
        raise Defect("unknown_label", f"{column} is {label[:80]!r}")
    return label


def _scalar(row: Mapping[str, Any], column: str) -> str | None:
    value = row.get(column)
    if value is None:
        return None
    if not isinstance(value, str | int):
        detail = f"{column} is {type(value).__name__}, not text or a whole number"
        raise Defect("wrong_type", detail)
    name = str(value)
    if len(name) > NAME_BYTES or _utf8_size(name) > NAME_BYTES:
        raise Defect("too_long", f"{column} has more than {NAME_BYTES} bytes")
    return name


def _chat(row: Mapping[str, Any], data: DataConfig) -> str:
    columns = data.columns
    value = row.get(columns.messages)
    if value is None and (columns.prompt in row or columns.completion in row):
        messages = [
            {"role": "user", "content": _text(row, columns.prompt)},
            {"role": "assistant", "content": _text(row, columns.completion)},
        ]
    else:
        messages = [_message(item) for item in _turns(value, columns.messages)]
        if not any(item["role"] == "assistant" for item in messages):
            raise Defect("bad_messages", "the assistant says nothing")
    return json.dumps(messages, ensure_ascii=False, separators=(",", ":"))


def _turns(value: Any, column: str) -> list[Any]:
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


def _message(item: Any) -> dict[str, str]:
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
