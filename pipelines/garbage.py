"""What `steadytrain gc` can remove."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Garbage:
    """Something to remove. `remove` removes it, or returns False if it is needed again."""

    what: str
    bytes: int
    remove: Callable[[], bool]
