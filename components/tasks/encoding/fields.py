"""Read the fields of a record, and name what is wrong with a bad one."""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any, Final

from steadytrain.components.shared.left_out import LONG

DEFECTS: Final = {
    "bad_encoding": "is not valid UTF-8",
    "bad_format": "cannot be read in the format of its file",
    "wrong_type": "a field has the wrong type or value",
    "missing_field": "a field is absent or null",
    "empty_field": "a field holds only white space",
    "bad_messages": "messages are not a chat with an assistant message",
    "prompt_mismatch": "its answers are whole conversations that do not begin with its prompt",
    "printed_alike": "its two answers are the same as the chat template prints them",
    "judged": "a column that is not used says how good the record is",
    "contradicted": "a column that is not used says that its chosen answer is not the better one",
    "not_a_class": "the label is a measured value or several classes",
    "unknown_label": "the label is not among data.labels",
    "missing_file": "names a file that is not there",
    "broken_image": "is not an image that can be read",
    "huge_image": "has more pixels than data.images.max_pixels",
    "too_long": "is longer than data.max_record_bytes, or a name in it than 1024 bytes",
    "refused_by_template": "the tokenizer's chat template rejects it",
    "label_unseen_in_training": "held out, with a label that training never saw",
    "not_predicted": "the model raises an error for it, or predicts no finite number",
}
"""By reason: what is wrong with a record."""
NO_CLASS_REMEDY: Final = (
    "give each record one class, as text or a whole number, or a list of labels with data.task "
    "multi_label_classification; list classes with names such as '0.5' in data.labels; to predict "
    "the number itself, use data.task sequence_regression"
)
"""The fix for records with the reason "not_a_class"."""
_NUMBER: Final = re.compile(r" *[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)? *")
"""A decimal number as text, also after the comma and space of a CSV file. Python reads more as one,
such as 1_000."""
_SCORE: Final = re.compile(
    r"(score|reward|rating|(sample_)?weight|quality(_score)?|(up|down)?vote|(dis)?like)s?"
    r"|(is_|was_)?(correct|accepted|approved|good|bad|(dis)?liked|preferred|desirable|helpful)"
    r"|thumbs?(_?(up|down))?|feedback|verdict",
    re.IGNORECASE,
)
"""Columns that say how good a record is, as a number or a yes or no."""
_VERDICTS: Final = ("true", "false", "0", "1", "-1", "+1")
_WORDS: Final = {
    *("true", "false", "yes", "no", "good", "bad", "up", "down", "positive", "negative"),
    *("like", "dislike", "thumbs_up", "thumbs_down", "thumbs up", "thumbs down"),
    *("accepted", "rejected", "correct", "incorrect"),
}
"""Judgments as text."""
NAME_BYTES: Final = 1024
"""Limit for a label or slice, because reports show it and it is held in memory."""


class Defect(Exception):
    """Why a record cannot be used. `reason` is a key of DEFECTS or LONG."""

    def __init__(self, reason: str, detail: str) -> None:
        if reason not in DEFECTS | LONG:
            raise ValueError(f"{reason!r} is not a reason; use one of {', '.join(DEFECTS)}")
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


def text_of(row: Mapping[str, Any], column: str) -> str:
    """Return the text in a column.

    Raises:
        Defect: it is absent, not text, or only white space.
    """
    value = row.get(column)
    if value is None:
        raise Defect("missing_field", f"{column} is absent or null")
    if not isinstance(value, str):
        raise Defect("wrong_type", f"{column} is {type(value).__name__}, not text")
    if not value.strip():
        raise Defect("empty_field", f"{column} is empty")
    return value


def name_of(row: Mapping[str, Any], column: str, *, limit: float = NAME_BYTES) -> str | None:
    """Return a name (a label, group or slice) from text or a whole number; None if it is null.

    Args:
        limit: bytes that it may have.

    Raises:
        Defect: it is something else, or too long.
    """
    value = row.get(column)
    if value is None:
        return None
    if isinstance(value, Decimal) and value == value.to_integral_value():
        # Databases export whole numbers like this.
        value = int(value)
    if not isinstance(value, str | int):
        detail = f"{column} is {type(value).__name__}, not text or a whole number"
        raise Defect("wrong_type", detail)
    name = str(value)
    if len(name) > limit or utf8_size(name) > limit:
        raise Defect("too_long", f"{column} has more than {limit} bytes")
    return name


def class_of(row: Mapping[str, Any], column: str, labels: Sequence[str] | None = None) -> str:
    """Return the one class of a record: a name, or a whole number.

    Args:
        labels: the only classes; None if any may occur.

    Raises:
        Defect: it is absent, something else, or not among the labels.
    """
    value = row.get(column)
    if isinstance(value, float | list):
        raise _not_a_class(column, value)
    label = name_of(row, column)
    if label is None:
        raise Defect("missing_field", f"{column} is absent or null")
    if not label.strip():
        raise Defect("empty_field", f"{column} is empty")
    if labels is None and (_has_fraction(label) or _is_list(label)):
        raise _not_a_class(column, value)
    if labels is not None and label not in labels:
        raise Defect("unknown_label", f"{column} is {label[:80]!r}")
    return label


def labels_of(
    row: Mapping[str, Any],
    column: str,
    labels: Sequence[str] | None = None,
    separator: str | None = None,
) -> list[str]:
    """Return the labels of a record, as often as it has them: names, or whole numbers.

    Args:
        labels: the only ones; None if any may occur.
        separator: between two labels of a text. None means that a text is one label, and that other
            records have a list.

    Raises:
        Defect: they are absent, something else, or not among `labels`.
    """
    value = row.get(column)
    if value is None:
        raise Defect("missing_field", f"{column} is absent or null; no label is an empty list")
    if separator is not None:
        if not isinstance(value, str):
            detail = f"{column} is {type(value).__name__}, and data.label_separator is for text"
            raise Defect("wrong_type", detail)
        value = [part.strip() for part in value.split(separator)] if value.strip() else []
    elif not isinstance(value, list):
        value = [value]
    # One place for each label, with 1 where the record has it. [0, 1] may be two numbered classes.
    is_mask = len(set(value)) < len(value) if all(map(_is_bit, value)) else False
    if is_mask or any(isinstance(one, bool | float) for one in value):
        raise Defect("not_a_class", f"{column} is {value!r:.80}, not a list of the record's labels")
    return [class_of({column: one}, column, labels) for one in value]


def _is_bit(value: Any) -> bool:
    return not isinstance(value, bool) and value in (0, 1)


def _not_a_class(column: str, value: Any) -> Defect:
    return Defect("not_a_class", f"{column[:80]} is {value!r:.80}, not one class")


def _has_fraction(label: str) -> bool:
    """Return whether text is a number such as 0.5, as CSV files hold measured values."""
    number = _NUMBER.fullmatch(label) if "." in label or "e" in label.casefold() else None
    return number is not None and not float(label).is_integer()


def _is_list(label: str) -> bool:
    """Return whether text is a list such as ['a', 'b'], as pandas writes it to CSV files."""
    if not label.lstrip().startswith("["):
        return False
    try:
        return isinstance(ast.literal_eval(label.strip()), list)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return False


def number_of(row: Mapping[str, Any], column: str) -> float:
    """Return a number, also from text such as 3, -0.5 or 1e-3.

    Raises:
        Defect: it is null, or no finite number.
    """
    value = row.get(column)
    if value is None:
        raise Defect("missing_field", f"{column} is absent or null")
    plain = _NUMBER.fullmatch(value) if isinstance(value, str) else not isinstance(value, bool)
    try:
        result = (
            float(value) if plain and isinstance(value, str | int | float | Decimal) else math.nan
        )
    except OverflowError:
        result = math.nan
    if not math.isfinite(result):
        raise Defect("wrong_type", f"{column} is {value!r:.80}, not a finite decimal number")
    return result


def is_judgment(column: str, value: Any, label: str) -> bool:
    """Return whether a column says how good a record is, as feedback and reward models do.

    Args:
        label: the column of classes. Only a yes or no there is a judgment.
    """
    if value is None:
        return False
    if column == label:
        return str(value).strip().casefold() in _VERDICTS
    return score_of(column, value) is not None or (
        isinstance(value, str)
        and value.strip().casefold() in _WORDS
        and _SCORE.fullmatch(column) is not None
    )


def score_of(column: str, value: Any) -> float | None:
    """Return the number in a column with the name of a score; None for any other column or value.

    Yes is 1, and no is 0.
    """
    numeric = _NUMBER.fullmatch(value) if isinstance(value, str) else True
    if not numeric or not isinstance(value, bool | int | float | str):
        return None
    return float(value) if _SCORE.fullmatch(column) else None


def utf8_size(text: str) -> int:
    """Return the size in bytes.

    Raises:
        Defect: the text holds code points that UTF-8 does not have.
    """
    try:
        return len(text.encode())
    except UnicodeEncodeError as error:
        raise Defect("bad_encoding", "contains bytes or code points that are not UTF-8") from error
