"""Which checkpoints of a run stay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Retention:
    """The newest `newest`, every one whose step is a multiple of `every`, and the best."""

    newest: int
    every: int | None = None

    def superfluous(self, steps: Sequence[int], *, best: int) -> list[int]:
        """Those of `steps` that may go.

        Args:
            best: step of the best model so far; 0 where there is none.
        """
        recent = set(sorted(steps)[-self.newest :])
        return [
            step
            for step in sorted(steps)
            if step not in recent and step != best and not (self.every and step % self.every == 0)
        ]
