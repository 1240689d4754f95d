"""What a run stores on disk, besides its data."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True)
class Stored:
    """Bytes of one checkpoint, and of the exported model."""

    checkpoint: float
    model: float

    @classmethod
    def of_weights(cls, trained: int, exported: int) -> Self:
        """Return what weights take: each 32 bits, and each trained one two moments of AdamW."""
        return cls(12 * trained, 4 * exported)

    @classmethod
    def total(cls, parts: Iterable[Stored]) -> Self:
        """Return what several models take together."""
        known = list(parts)
        return cls(sum(part.checkpoint for part in known), sum(part.model for part in known))

    def grown_to(self, steps: int, later: Stored, at: int) -> Stored:
        """Return what is stored after all steps, from what is stored after the first one.

        Args:
            later: what is stored after step `at`. If that is 1, nothing tells whether it grows.
        """

        def end(first: float, last: float) -> float:
            return first + (last - first) / (at - 1) * (steps - 1) if at > 1 else first * steps

        return Stored(end(self.checkpoint, later.checkpoint), end(self.model, later.model))

    def times(self, factor: float) -> Stored:
        """Return the same of a larger model."""
        return Stored(factor * self.checkpoint, factor * self.model)
