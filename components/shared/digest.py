"""Digests: of files, of plain data, of this code. All SHA-256, in hex."""

from __future__ import annotations

import functools
import hashlib
import json
import os
from pathlib import Path
from typing import Any

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
def code_digest() -> str:
    """Digest of the product's own sources, and of the image where it is told."""
    root = Path(__file__).resolve().parents[1]
    sources = {
        path.relative_to(root).as_posix(): file_digest(path) for path in sorted(root.rglob("*.py"))
    }
    return value_digest([sources, os.environ.get(IMAGE_DIGEST_VARIABLE, "")])
