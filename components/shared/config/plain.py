"""A configuration as plain data: fields by their full names, and values that readers reject."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, Final

from steadytrain.components.shared.config.document import MAX_DEPTH
from steadytrain.components.shared.config.secrets import PLACEHOLDER, names_a_secret, redact
from steadytrain.components.shared.errors import BadInput, Problem

# Check for values that some readers of a configuration cannot represent.
#
# The readers are YAML, JSON, C, and steadytrain itself.

_LARGEST: Final = 2**63 - 1
_SHOWN: Final = 80


def find_unfit(content: Any, field: str = "", depth: int = 0) -> Iterator[Problem]:
    """Yield a problem for each value in a nested configuration that cannot round-trip."""
    if depth > MAX_DEPTH:
        yield _problem(field, "...", f"nested deeper than {MAX_DEPTH} levels", "nest it less")
    elif isinstance(content, dict):
        for key, value in content.items():
            if not isinstance(key, str):
                yield _problem(field, shown(key), "a key must be text", "put it in quotes")
            elif why := _unfit_text(key):
                yield _problem(field, shown(key), f"a key {why[0]}", why[1])
            else:
                yield from find_unfit(value, f"{field}.{key}" if field else key, depth + 1)
    elif isinstance(content, list):
        for index, value in enumerate(content):
            yield from find_unfit(value, f"{field}.{index}", depth + 1)
    elif why := _unfit(content):
        yield _problem(field, shown(content), *why)


def _unfit(value: object) -> tuple[str, str] | None:
    """Return what is wrong with a single value and the fix, or None."""
    if value is None or isinstance(value, bool):
        return None
    if isinstance(value, str):
        return _unfit_text(value)
    if isinstance(value, int):
        return ("is beyond 64 bits", "give a smaller number") if abs(value) > _LARGEST else None
    if isinstance(value, float):
        finite = math.isfinite(value)
        return None if finite else ("is not a finite number", "give a finite number")
    return f"is a {type(value).__name__}", "give text, a number, a list, or a mapping"


def shown(value: object) -> str:
    """Return a value as an error message shows it, shortened if it is long."""
    try:
        return shortened(repr(value))
    except ValueError:  # more digits than Python converts to text
        return "a number with thousands of digits"


def shortened(text: str) -> str:
    """Shorten text for an error message if it is long."""
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


def _unfit_text(text: str) -> tuple[str, str] | None:
    if "\0" in text:
        return "contains a NUL character", "remove it"
    try:
        text.encode()
    except UnicodeEncodeError:
        return "contains half of a surrogate pair, which is not a character", "remove it"
    return None


def _problem(field: str, value: str, message: str, remedy: str) -> Problem:
    if names_a_secret(field.rpartition(".")[2]):
        value = PLACEHOLDER
    return Problem(shortened(field) or "configuration", redact(value), message, remedy)


def assign(content: dict[str, Any], field: str, value: Any) -> None:
    """Set a field, and create the sections that it needs.

    Raises:
        BadInput: if a part of the name is not a section.
    """
    *sections, last = field.split(".")
    place = content
    for section in sections:
        inner = place.setdefault(section, {})
        if not isinstance(inner, dict):
            raise BadInput(
                f"override {shown(redact(field))}: {shown(redact(section))} is not a section",
                remedy="`steadytrain schema` lists every field",
            )
        place = inner
    place[last] = value


def stated_fields(content: Mapping[str, Any], before: str = "") -> frozenset[str]:
    """Return the full names of the fields that plain data state."""
    names: set[str] = set()
    for name, value in content.items():
        full = f"{before}{name}"
        names |= stated_fields(value, f"{full}.") if isinstance(value, dict) and value else {full}
    return frozenset(names)
