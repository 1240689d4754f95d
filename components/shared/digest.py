"""Digests: of files, of plain data, of this code. All SHA-256, in hex."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import json
import os
from pathlib import Path
from typing import Any

DATA_CODE = ("preprocess", "shared")
TRAINING_CODE = ("train", "tasks", "shared")
JUDGING_CODE = ("evaluate", "tasks", "shared")
"""Folders of `components` that a step's outputs come from."""

IMAGE_DIGEST_VARIABLE = "STEADYTRAIN_IMAGE_DIGEST"


def file_digest(path: Path) -> str:
    """Digest of a file's content."""
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def value_digest(content: Any) -> str:
    """Digest of plain data (what JSON can hold), independent of the order of keys."""
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


@functools.cache
def code_digest(*rooms: str) -> str:
    """Digest of the product's own sources, and of the image where it is told.

    Args:
        rooms: folders of `components`, such as "preprocess"; none: all of them.
    """
    root = Path(__file__).resolve().parents[1]
    folders = [root / room for room in rooms] or [root]
    sources = {
        path.relative_to(root).as_posix(): file_digest(path)
        for folder in folders
        for path in sorted(folder.rglob("*.py"))
    }
    return value_digest([sources, os.environ.get(IMAGE_DIGEST_VARIABLE, "")])


def users_code_digest(name: str) -> str:
    """Digest of the user's module in a `module:Class`; "" where `name` names none of theirs."""
    module, separator, _ = name.partition(":")
    try:
        spec = importlib.util.find_spec(module) if separator else None
    except (ImportError, ValueError):
        # Whoever opens it says what is wrong with it.
        return ""
    return file_digest(Path(spec.origin)) if spec and spec.has_location and spec.origin else ""
