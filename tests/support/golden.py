"""Golden files: what the product writes, compared as a whole."""

from __future__ import annotations

import os
from pathlib import Path


def assert_golden(path: Path, text: str) -> None:
    """Assert that a file holds this text. With REWRITE_GOLDEN set, write the text into it first."""
    if os.environ.get("REWRITE_GOLDEN"):
        path.write_text(text)
    assert text == path.read_text()
