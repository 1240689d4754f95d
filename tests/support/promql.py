"""The names in PromQL expressions, as far as our own expressions go."""

from __future__ import annotations

import re
from typing import NamedTuple

_TEXT = re.compile(r'"[^"]*"')
_RANGE = re.compile(r"\[[^\]]*\]")
_MATCHERS = re.compile(r"\{([^}]*)\}")
_GROUPING = re.compile(r"\b(?:by|without|on|ignoring)\s*\(([^)]*)\)")
_WORD = re.compile(r"(?<![\w:.$])[a-zA-Z_:][\w:]*")
_OPERATORS = {"and", "or", "unless", "offset", "bool"}


class Names(NamedTuple):
    """What an expression refers to."""

    series: set[str]
    labels: set[str]


def names(expression: str) -> Names:
    """Return the names of series and labels in an expression."""
    rest = _RANGE.sub("", _TEXT.sub('""', expression))
    labels = {word for part in _MATCHERS.findall(rest) for word in _WORD.findall(part)}
    labels |= {word for part in _GROUPING.findall(rest) for word in _WORD.findall(part)}
    rest = _GROUPING.sub("", _MATCHERS.sub("", rest))
    series = {
        found[0]
        for found in _WORD.finditer(rest)
        if not rest[found.end() :].lstrip().startswith("(") or found[0] in _OPERATORS
    }
    durations = {word for word in series if re.fullmatch(r"\d+[smhd]", word)}
    return Names(series - _OPERATORS - durations, labels)
