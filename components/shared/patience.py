"""How long to wait for temporary faults of servers and storage."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Final, TypeVar

from steadytrain.components.shared.errors import SteadytrainError, StorageError

T = TypeVar("T")

AWAY_SECONDS = 180.0
"""How long a server may be unavailable, if nothing can continue without it."""
DENIED_SECONDS = 45.0
"""How long a server may deny requests (401, 403), if nothing can continue without them. A starting
server denies everything until it has read tokens and roles, and authorizing webhooks cache a denial
for 30 s."""
REFUSED_SECONDS = 60.0
"""How long storage may reject a write that the run cannot continue without."""
FOREVER: Final = math.inf
_REFUSED_DELAY = 1.0
_FIRST_DELAY, _LONGEST_DELAY = 0.5, 8.0


class Patience:
    """Tolerates temporary faults of one server.

    Args:
        away: seconds that the server may be unavailable.
        denied: seconds that the server may deny requests.
    """

    def __init__(self, *, away: float, denied: float) -> None:
        self.away, self.denied = away, denied
        self._since: dict[str, float] = {}

    def bears(self, error: SteadytrainError) -> bool:
        """Record a fault. Return whether it may still be temporary."""
        if error.passing:
            # A server that comes back after being unavailable denies requests at first.
            self._since.pop("denied", None)
            return self._lasted("away") < self.away
        return error.denied and self._lasted("denied") < self.denied

    def reset(self) -> None:
        """Record that the server has responded."""
        self._since.clear()

    def _lasted(self, fault: str) -> float:
        now = time.monotonic()
        return now - self._since.setdefault(fault, now)


def patiently(call: Callable[[], T], *, wait: Callable[[float], object] = time.sleep) -> T:
    """Retry a call until the server responds and no longer denies it.

    Errors that last longer than AWAY_SECONDS or DENIED_SECONDS are raised. Permanent errors are
    raised at once.

    Args:
        call: the call.
        wait: waits a number of seconds between two calls.
    """
    patience, delay = Patience(away=AWAY_SECONDS, denied=DENIED_SECONDS), _FIRST_DELAY
    while True:
        try:
            return call()
        except SteadytrainError as error:
            if not patience.bears(error):
                raise
        wait(delay)
        delay = min(2 * delay, _LONGEST_DELAY)


def retry_rejected(call: Callable[[], T], seconds: float = REFUSED_SECONDS) -> T:
    """Retry a write until storage accepts it. After `seconds`, raise its error."""
    end = time.monotonic() + seconds
    while True:
        try:
            return call()
        except StorageError:
            if time.monotonic() >= end:
                raise
        time.sleep(_REFUSED_DELAY)
