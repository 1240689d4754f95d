"""Requests to stop: signals to this process, and the attempt's stop file.

A request is only recorded. The ranks agree on it in a reduction that each step performs anyway, so
all of them stop at the same step.
"""

from __future__ import annotations

import signal
from pathlib import Path
from types import FrameType
from typing import Final

from steadytrain.components.shared.events.types import AttemptOutcome

OUTCOMES: Final[tuple[AttemptOutcome, ...]] = ("preempted", "stopped", "pruned")
"""Outcomes that a request can ask for. With several requests, the first in this list wins."""

_SIGNALS: dict[int, AttemptOutcome] = {signal.SIGTERM: "preempted", signal.SIGINT: "stopped"}


class StopRequests:
    """The requests that have reached this process.

    Args:
        file: the attempt's stop file, on the one rank that watches it; None on all others.
    """

    def __init__(self, file: Path | None) -> None:
        self.file = file
        self.received: set[AttemptOutcome] = set()

    def listen(self) -> None:
        """Treat SIGTERM as a preemption and SIGINT as a stop."""
        for number in _SIGNALS:
            signal.signal(number, self._note)

    def flags(self) -> list[int]:
        """Return 1 for each of OUTCOMES that was requested, 0 for the others."""
        if self.file is not None and self.file.exists():
            self.received.add("pruned" if self.file.read_text().strip() == "pruned" else "stopped")
        return [int(outcome in self.received) for outcome in OUTCOMES]

    @property
    def asked(self) -> AttemptOutcome | None:
        """The outcome that this process was asked for, or None."""
        return next((name for name, flag in zip(OUTCOMES, self.flags(), strict=True) if flag), None)

    def _note(self, number: int, _: FrameType | None) -> None:
        self.received.add(_SIGNALS[number])
