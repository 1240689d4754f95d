"""A cache for short texts that occur often, such as words and pieces of words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeVar

V = TypeVar("V")

MOST: Final = 1 << 17
LONGEST: Final = 48
"""Maximum length of a cached text. Together with MOST, the maximum number, it limits memory."""


class Remembered(dict[str, V]):
    """Caches the results of a function of a text. A full cache is cleared.

    It is a dictionary, because lookups in anything else are slower.
    """

    def __init__(self, function: Callable[[str], V]) -> None:
        super().__init__()
        self._function = function

    def __missing__(self, text: str) -> V:
        found = self._function(text)
        if len(text) <= LONGEST:
            if len(self) >= MOST:
                self.clear()
            self[text] = found
        return found
