"""Requests to stop: signals to this process, and the attempt's stop file.

A request is only noted. The ranks agree on it in a reduction that each step has
anyway, so that all of them leave at the same step.
"""

from __future__ import annotations

import signal
from pathlib import Path
from types import FrameType
from typing import Final

from steadytrain.components.shared.events.types import AttemptOutcome

OUTCOMES: Final[tuple[AttemptOutcome, ...]] = ("preempted", "stopped", "pruned")
"""What a request can ask for; where there are several, the first wins."""

_SIGNALS: dict[int, AttemptOutcome] = {signal.SIGTERM: "preempted", signal.SIGINT: "stopped"}


class StopRequests:
    """The requests that have reached this process.

    Args:
        file: the attempt's stop file, for the one rank that looks at it.
    """

    def __init__(self, file: Path | None) -> None:
        self.file = file
        self.received: set[AttemptOutcome] = set()

    def listen(self) -> None:
        """Takes SIGTERM as a preemption and SIGINT as a stop."""
        for number in _SIGNALS:
            signal.signal(number, self._note)

    def flags(self) -> list[int]:
        """1 for each of OUTCOMES that is asked for."""
        if self.file is not None and self.file.exists():
            self.received.add("pruned" if self.file.read_text().strip() == "pruned" else "stopped")
        return [int(outcome in self.received) for outcome in OUTCOMES]

    def _note(self, number: int, _: FrameType | None) -> None:
        self.received.add(_SIGNALS[number])
