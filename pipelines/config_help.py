"""Explain a configuration: what a field is and affects, and a template with comments."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from steadytrain.components.shared.config.document import dump
from steadytrain.components.shared.config.fields import (
    REQUIRED,
    Field,
    describe,
    effect_of,
    is_adjustable,
)
from steadytrain.pipelines.sources import Selection


@dataclass(frozen=True)
class Explained:
    """A field with its present value.

    value: as plain data; a section's fields have explanations of their own in `inner`.
    origin: where the value comes from, such as a file, --set or the default; "" if it is not known.
    """

    field: Field
    value: Any
    origin: str
    affects: str
    inner: tuple[Explained, ...] = ()

    def lines(self) -> list[str]:
        """Return the explanation for a terminal."""
        meaning = textwrap.indent(textwrap.fill(self.field.description, 86), "  ").splitlines()
        rows = (f"  {name:8} {text}" for name, text in self._rows())
        return [self.field.name, *meaning, "", *rows, *(f"  {item}" for item in self.inner)]

    def __str__(self) -> str:
        """Return the field with its value in one line, or only the name of a section."""
        known = self.origin and not self.inner
        return f"{self.field.name} = {self._value}" if known else self.field.name

    @property
    def _value(self) -> str:
        return f"{_plain(self.value)} ({self.origin})"

    def as_data(self) -> dict[str, Any]:
        """Return the explanation for programs."""
        field = self.field
        result: dict[str, Any] = {"field": field.name, "description": field.description}
        if self.inner:
            return {**result, "affects": self.affects, "fields": [i.as_data() for i in self.inner]}
        required = field.default is REQUIRED
        default = {} if required else {"default": field.default}
        kind = {"type": field.kind, "limits": field.limits, "unit": field.unit}
        values = {"value": self.value, "origin": self.origin, "affects": self.affects}
        return {**result, **kind, "required": required, **default, **values}

    def _rows(self) -> Iterator[tuple[str, str]]:
        field = self.field
        if not self.inner:
            required = field.default is REQUIRED
            yield "type", f"{field.kind} ({field.limits})" if field.limits else field.kind
            if field.unit:
                yield "unit", field.unit
            yield "default", "none, it is required" if required else _plain(field.default)
            if self.origin:
                yield "value", self._value
        if self.affects:
            yield "affects", self.affects


def explained(name: str, chosen: Selection | None = None) -> Explained:
    """Explain a field or section by its full name, such as training.max_steps or gate.

    Args:
        chosen: the configuration with its value; None leaves out the value.

    Raises:
        BadInput: there is no such field. The message names the closest one.
    """
    field = describe(name)
    inner = tuple(explained(f"{name}.{part}", chosen) for part in field.inner)
    if chosen is None:
        return Explained(field, None, "", _affects(field, inner), inner)
    value: Any = chosen.config.model_dump(mode="json")
    for part in name.split("."):
        if isinstance(value, list):
            # Each item of the list has a value of its own.
            return Explained(field, None, "", _affects(field, inner), inner)
        value = value[part]
    return Explained(field, value, chosen.origin(name), _affects(field, inner), inner)


def _affects(field: Field, inner: tuple[Explained, ...]) -> str:
    """Return what a change affects; "" for a section whose fields affect different things."""
    affected = {item.affects for item in inner} or {_effect(field.name)}
    return affected.pop() if len(affected) == 1 else ""


def _effect(name: str) -> str:
    label, *change = str(effect_of(name)).split(". ", 1)
    adjusted = ["`steadytrain adjust` changes it while a run trains"] if is_adjustable(name) else []
    return ". ".join([label, *adjusted, *change])


def _plain(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


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
    # To libyaml, a negative width has no limit; infinity is an error.
    text = dump(value, default_flow_style=True, width=-1)
    # PyYAML ends a plain scalar with a document end.
    return text.removesuffix("...\n").rstrip("\n")
