"""The caller's span, in the form of W3C's header `traceparent`."""

from __future__ import annotations

import os
import re
from typing import Final

TRACEPARENT: Final = "TRACEPARENT"
"""Variable with the span."""

FORM: Final = re.compile(
    r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})"
)
"""Version, trace id, span id and flags; the last three are groups."""


def callers_span() -> str:
    """Return the span of this process's caller; "" if the variable names none."""
    text = os.environ.get(TRACEPARENT, "").strip()
    return text if FORM.fullmatch(text) else ""
