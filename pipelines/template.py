"""Write a configuration that explains itself: the fields that matter, each with a comment."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from steadytrain.components.shared.config.document import dump
from steadytrain.components.shared.config.fields import describe

_WIDTH = 88


@dataclass(frozen=True)
class Entry:
    """A field of the file.

    name: full name, such as data.source.
    reason: why it has this value.
    """

    name: str
    value: Any
    reason: str


def template(entries: Sequence[Entry], heading: Sequence[str]) -> str:
    """Return a commented configuration as YAML.

    Args:
        entries: fields of the same section must follow each other.
        heading: sentences for the first comment.
    """
    lines = [*_comment(" ".join(heading), ""), ""]
    before = ""
    for entry in entries:
        section, _, name = entry.name.rpartition(".")
        indent = "  " if section else ""
        if section != before:
            lines += ["", f"{section}:"] if section else [""]
            before = section
        lines += _comment(f"{_meaning(entry.name)} Here: {entry.reason}.", indent)
        lines.append(f"{indent}{name}: {_value(entry.value)}")
    return "\n".join(lines) + "\n"


def _meaning(name: str) -> str:
    """Return the first sentence of a field's description, with its unit."""
    field = describe(name)
    first = field.description.split(". ")[0].rstrip(".")
    unit = field.unit.partition(",")[0]
    return f"{first} ({unit})." if unit and unit not in first.lower() else f"{first}."


def _comment(text: str, indent: str) -> list[str]:
    start = f"{indent}# "
    # YAML ends a comment at line separators that textwrap does not know.
    return textwrap.wrap(
        " ".join(text.split()),
        _WIDTH,
        initial_indent=start,
        subsequent_indent=start,
        break_on_hyphens=False,
    )


def _value(value: Any) -> str:
    """Return a value as YAML on one line."""
    text = dump(value, default_flow_style=True, width=math.inf)
    # PyYAML ends a plain scalar with a document end.
    return text.removesuffix("...\n").rstrip("\n")
