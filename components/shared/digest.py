"""Digests of files, of plain data, and of steadytrain's code. All are SHA-256 in hex."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

_KINDS = ("tabular", "images", "series", "multimodal")
DATA_CODE = ("preprocess", "tasks/encoding", *_KINDS, "techniques", "shared")
TRAINING_CODE = ("train", "sizing", "memory", *_KINDS, "tasks", "techniques", "shared")
JUDGING_CODE = ("evaluate", *_KINDS, "tasks", "techniques", "shared")
"""Folders of `components` that determine the outputs of a step."""

BASE_FILE = "base.json"
"""Describes the base model of adapters that are stored without it."""
THRESHOLDS = "steadytrain_thresholds"
"""Field of config.json: from which probability on a model predicts each label."""
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt")
MODEL_FILES = (*_WEIGHTS, "config.json")
"""The files that a model's outputs depend on."""

IMAGE_DIGEST_VARIABLE = "STEADYTRAIN_IMAGE_DIGEST"


def file_digest(path: Path) -> str:
    """Return the digest of a file's content."""
    with path.open("rb") as handle:
        return stream_digest(handle)


def stream_digest(handle: BinaryIO) -> str:
    """Return the digest of an open file from its current position on."""
    return hashlib.file_digest(handle, "sha256").hexdigest()  # type: ignore[arg-type]


def weights_digest(model: Path) -> str:
    """Return the digest of an exported model's weights, including the note about its base model.

    Thresholds in its configuration count too: with others, the model predicts other labels. If no
    file is known to hold weights, because another framework wrote them, all files count. A file is
    read again only if its size, times or location changed since this process read it.
    """
    files = [path for pattern in (*_WEIGHTS, BASE_FILE) for path in model.rglob(pattern)]
    files = files or [path for path in model.rglob("*") if path.is_file()]
    digests = {path.relative_to(model): _digest_as_of(path, _state(path)) for path in files}
    known: dict[str, Any] = {path.as_posix(): digest for path, digest in digests.items()}
    for path in model.rglob("config.json"):
        with contextlib.suppress(ValueError, AttributeError):
            if thresholds := json.loads(path.read_bytes()).get(THRESHOLDS):
                known[THRESHOLDS] = thresholds
    return value_digest(known)


def beside_weights(model: Path) -> dict[str, str]:
    """Return the digest of each file of an exported model but its weights, by relative path."""
    weights = {path for pattern in _WEIGHTS for path in model.rglob(pattern)}
    others = {path for path in model.rglob("*") if path.is_file()} - weights
    return {
        path.relative_to(model).as_posix(): _digest_as_of(path, _state(path))
        for path in sorted(others)
    }


def files_digest(folder: Path, patterns: Sequence[str]) -> str:
    """Return the digest of a folder's direct files whose names match one of the patterns.

    A file is read again only if its size, times or location changed since this process read it.
    """
    files = {path for pattern in patterns for path in folder.glob(pattern)}
    return value_digest({path.name: _digest_as_of(path, _state(path)) for path in files})


def _state(path: Path) -> tuple[int, ...]:
    stat = path.stat()
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns


@functools.lru_cache(maxsize=1024)
def _digest_as_of(path: Path, _state: tuple[int, ...]) -> str:
    return file_digest(path)


def value_digest(content: Any) -> str:
    """Return the digest of plain data (anything JSON can hold), regardless of key order."""
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


@functools.cache
def code_digest(*folders: str) -> str:
    """Return the digest of steadytrain's own sources, and of the image if that is known.

    Args:
        folders: folders of `components`, such as "tasks/encoding". Without any, all of them.
    """
    root = Path(__file__).resolve().parents[1]
    roots = [root / folder for folder in folders] or [root]
    sources = {
        path.relative_to(root).as_posix(): file_digest(path)
        for folder in roots
        for path in sorted(folder.rglob("*.py"))
    }
    return value_digest([sources, os.environ.get(IMAGE_DIGEST_VARIABLE, "")])


def users_code_digest(address: str) -> str:
    """Return the digest of the package, or the single module, that `module:name` is in.

    "" means that there is no such module.
    """
    module, separator, _ = address.partition(":")
    parts = module.split(".") if separator else []
    # Of a namespace package, only the part that `module` is in counts.
    for count in range(1, len(parts) + 1):
        try:
            spec = importlib.util.find_spec(".".join(parts[:count]))
        except (ImportError, ValueError):
            # The code that imports the module reports the error.
            return ""
        if spec is not None and spec.has_location and spec.origin:
            origin = Path(spec.origin)
            files = origin.parent.rglob("*.py") if spec.submodule_search_locations else [origin]
            named = {path.relative_to(origin.parent).as_posix(): path for path in files}
            return value_digest({name: file_digest(path) for name, path in named.items()})
    return ""
