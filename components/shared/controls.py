"""Control characters in text that a run wrote: they would change a terminal or a page."""

from __future__ import annotations

import re
from typing import Final

_CONTROL: Final = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|[\x00-\x08\x0b-\x1f\x7f]")
"""The sequences with which a terminal sets colors (ECMA-48), and the other control characters."""


def without_controls(text: str) -> str:
    """Return text of several lines without colors and control characters but tab and newline."""
    return _CONTROL.sub("", text.replace("\r\n", "\n").replace("\r", "\n"))


def on_one_line(text: str) -> str:
    """Return text in which each character that cannot be printed is a space."""
    return "".join(sign if sign.isprintable() else " " for sign in text)
