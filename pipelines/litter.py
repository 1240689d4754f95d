"""What `steadytrain gc` can remove."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Litter:
    """Something that can go. `remove` removes it; False where it is needed again."""

    what: str
    bytes: int
    remove: Callable[[], bool]
