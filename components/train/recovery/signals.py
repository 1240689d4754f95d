"""SIGTERM and SIGINT as requests that a loop can look at."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import FrameType

from steadytrain.components.shared.events.types import AttemptOutcome

_OUTCOMES: dict[int, AttemptOutcome] = {signal.SIGTERM: "preempted", signal.SIGINT: "stopped"}


@dataclass
class StopRequest:
    """What this process was asked.

    outcome: what to report; None where nobody asked.
    urgent: asked more than once: without the grace.
    """

    outcome: AttemptOutcome | None = None
    urgent: bool = False
    asked: threading.Event = field(default_factory=threading.Event)

    def ask(self, outcome: AttemptOutcome) -> None:
        """Asks to stop; the first request's outcome stays."""
        self.urgent = self.outcome is not None
        self.outcome = self.outcome or outcome
        self.asked.set()

    def wait(self, seconds: float) -> bool:
        """Waits, at most until someone asks; whether someone did."""
        return self.asked.wait(seconds)


@contextlib.contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """Notes signals while the context lasts; outside of the main thread there are none."""
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return

    def note(number: int, _: FrameType | None) -> None:
        request.ask(_OUTCOMES[number])

    before = {number: signal.signal(number, note) for number in _OUTCOMES}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
