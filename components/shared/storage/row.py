"""A sequence of numbered objects, each written only if absent. The highest number is current.

If several processes claim the next number, exactly one gets it. An earlier holder's object is never
taken over, because that would need compare-and-swap.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from steadytrain.components.shared.storage.base import Storage


@dataclass(frozen=True)
class Row:
    """The numbered objects of one lock.

    prefix, digits: how their names are formed.
    """

    storage: Storage
    prefix: ClassVar[str] = ""
    digits: ClassVar[int] = 20

    def name(self, number: int) -> str:
        """Return the name of the object with a number."""
        return f"{self.prefix}{number:0{self.digits}d}"

    def number(self, name: str) -> int:
        """Return the number of an object; 0 if the name is not one of ours."""
        found = re.fullmatch(rf"{self.prefix}(\d{{{self.digits},}})", name)
        return int(found[1]) if found else 0

    def names(self) -> Sequence[str]:
        """Return the names of all objects that may hold a number."""
        return self.storage.list(self.prefix)

    def last(self) -> int:
        """Return the highest number so far; 0 if there is none."""
        return max(map(self.number, self.names()), default=0)

    def claim(self, number: int, content: bytes) -> bool:
        """Claim a number and delete the earlier ones. Return False if another process has it."""
        name = self.name(number)
        if not self.storage.write(name, content, if_absent=True):
            return False
        # If the caller looked long ago, the number may have been claimed and deleted since then.
        if self.last() != number:
            self.storage.delete(name)
            return False
        for older in self.storage.list(self.prefix):
            if 0 < self.number(older) < number:
                self.storage.delete(older)
        return True
