"""What a rank does while another model works on the training rows, before the first step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from steadytrain.components.shared.events.types import AttemptOutcome
from steadytrain.components.train.loop.control import OUTCOMES


class StoppedEarly(Exception):
    """The ranks were asked to stop before the first step. What they had found is stored."""

    def __init__(self, outcome: AttemptOutcome) -> None:
        super().__init__(outcome)
        self.outcome = outcome


@dataclass(frozen=True)
class Watch:
    """What a rank does while it waits for the other model.

    beat: records a sign of life.
    flags: returns 1 for each of `OUTCOMES` that this rank was asked for.
    progress: reports what is being done, rows done, and all rows, on rank 0.
    warn: reports something odd, on rank 0.
    """

    beat: Callable[[], None] = lambda: None
    flags: Callable[[], list[int]] = lambda: [0] * len(OUTCOMES)
    progress: Callable[[str, int, int], None] = lambda _work, _done, _total: None
    warn: Callable[[str], None] = lambda _message: None


def asked_of(flags: Sequence[Sequence[int]]) -> AttemptOutcome | None:
    """Return what any rank was asked for, from the flags of all; None if none was asked."""
    votes = zip(OUTCOMES, zip(*flags, strict=True), strict=True)
    return next((outcome for outcome, asked in votes if any(asked)), None)
