"""Stop signals as requests that a loop can look at."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import FrameType

from steadytrain.components.shared.events.types import AttemptOutcome
from steadytrain.components.shared.stopping import stop_signals

_BY_HAND = (signal.SIGINT, signal.SIGQUIT)


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

    def note(number: int, _: FrameType | None) -> None:
        request.ask("stopped" if number in _BY_HAND else "preempted")

    with stop_signals(note):
        yield request
