"""Names and values as MLflow accepts them. If one is too long, it rejects the complete batch."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

from steadytrain.components.shared.config.secrets import redact

MAX_KEY = 250
MAX_VALUE = 6000
MAX_PARAMS_A_CALL = 100
MAX_METRICS_A_CALL = 1000

T = TypeVar("T")


def key(name: str) -> str:
    """Return a name that MLflow accepts as the key of a parameter or metric."""
    return re.sub(r"[^\w\-./: ]", "_", name)[:MAX_KEY]


def value(content: object) -> str:
    """Return the text of a parameter or tag: without secrets, and cut to MLflow's limit."""
    text = redact(str(content))
    return text if len(text) <= MAX_VALUE else f"{text[: MAX_VALUE - 3]}..."


def flatten(content: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield nested plain data as pairs of dotted key and text."""
    if isinstance(content, dict) and content:
        for name, inner in content.items():
            yield from flatten(inner, f"{prefix}.{name}" if prefix else str(name))
    else:
        yield key(prefix), value(content)


def in_parts(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    """Yield slices of at most `size` items."""
    for start in range(0, len(items), size):
        yield items[start : start + size]
