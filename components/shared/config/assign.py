"""Fields of a configuration in plain data, by their full names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from steadytrain.components.shared.config.plain import shown
from steadytrain.components.shared.config.secrets import redact
from steadytrain.components.shared.errors import BadInput


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
