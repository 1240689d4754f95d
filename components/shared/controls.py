"""Control characters in text that a run wrote: they would change a terminal or a page."""

from __future__ import annotations

import re
from typing import Final

_CONTROL: Final = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""The sequences with which a terminal sets colors (ECMA-48), and the other control characters."""


def without_controls(text: str) -> str:
    """Return text of several lines without colors and control characters but tab and newline."""
    return _CONTROL.sub("", text.replace("\r\n", "\n").replace("\r", "\n"))


def printable(text: str) -> str:
    """Escape what cannot be encoded, and drop what controls a terminal.

    Names of files and packages are anybody's: they may have bytes that are not valid text.
    """
    return without_controls(text.encode(errors="backslashreplace").decode())


def on_one_line(text: str) -> str:
    """Return text in which each character that cannot be printed is a space."""
    return "".join(sign if sign.isprintable() else " " for sign in text)
