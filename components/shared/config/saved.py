"""A run's saved configuration, with the digest of each section in its first line.

A file that was cut short may still be a valid configuration. The sections that it lost would get
their defaults, and the gate would apply other rules.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from steadytrain.components.shared.config.document import dump
from steadytrain.components.shared.digest import value_digest

_MARK: Final = "# SHA-256 of each section: "
_DIGITS: Final = 12


def saved_text(content: Mapping[str, Any]) -> str:
    """Return a configuration as YAML that shows later changes."""
    digests = (f"{name} {_digest(value)}" for name, value in content.items())
    return f"{_MARK}{', '.join(digests)}\n{dump(content)}"


def _changes(text: str, content: Mapping[str, Any]) -> list[str]:
    """Return the sections that differ from what was saved; none without digests.

    Args:
        content: what the text states.
    """
    first, _, _ = text.partition("\n")
    if not first.startswith(_MARK):
        return []  # people wrote it, or an older version
    pairs = (item.partition(" ") for item in first.removeprefix(_MARK).split(", "))
    before = {name: digest for name, _, digest in pairs}
    now = {name: _digest(value) for name, value in content.items()}
    return [
        name if name in now else f"{name} (missing)"
        for name in {**before, **now}
        if before.get(name) != now.get(name)
    ]


def damage(text: str, content: Mapping[str, Any]) -> str:
    """Return in words how a saved configuration was changed since; "" if it was not."""
    changed = ", ".join(_changes(text, content))
    return f"was edited or cut short after a run saved it: {changed}" if changed else ""


def _digest(value: Any) -> str:
    return value_digest(value)[:_DIGITS]
