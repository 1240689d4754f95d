"""Turn stop signals into requests that a loop can poll."""

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
    """A request to stop this process.

    outcome: the outcome to report; None if nobody asked to stop.
    urgent: asked more than once, so stop without the grace period.
    """

    outcome: AttemptOutcome | None = None
    urgent: bool = False
    asked: threading.Event = field(default_factory=threading.Event)

    def ask(self, outcome: AttemptOutcome) -> None:
        """Ask to stop. The outcome of the first request stays."""
        self.urgent = self.outcome is not None
        self.outcome = self.outcome or outcome
        self.asked.set()

    def wait(self, seconds: float) -> bool:
        """Wait until someone asks to stop, at most `seconds`. Return whether someone did."""
        return self.asked.wait(seconds)


@contextlib.contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """Record stop signals while the context is active. Only the main thread can receive them."""
    request = StopRequest()

    def note(number: int, _: FrameType | None) -> None:
        request.ask("stopped" if number in _BY_HAND else "preempted")

    with stop_signals(note):
        yield request
