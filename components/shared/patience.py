"""How long to wait for temporary faults of servers and storage."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
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
            return self.bears_absence()
        return error.denied and self._lasted("denied") < self.denied

    def bears_absence(self) -> bool:
        """Record that the server is unavailable. Return whether that may still be temporary."""
        return self._lasted("away") < self.away

    def reset(self) -> None:
        """Record that the server has responded."""
        self._since.clear()

    def _lasted(self, fault: str) -> float:
        now = time.monotonic()
        return now - self._since.setdefault(fault, now)


class AwaitedServer:
    """A server that requests of this thread wait for while it is down.

    Args:
        away: seconds that it may be down at a time.
        tell: called once for each time that it is down, with the reason.
    """

    def __init__(self, away: float, tell: Callable[[str], object]) -> None:
        self._patience, self._tell = Patience(away=away, denied=0.0), tell
        self._delays, self._told = _delays(), False

    def may_come_back(self, why: str) -> bool:
        """Record that it is down. Return whether to wait for it."""
        if not self._patience.bears_absence():
            return False
        if not self._told:
            self._told = True
            self._tell(why)
        return True

    def pause(self) -> None:
        """Wait before the next request, longer each time."""
        time.sleep(next(self._delays))

    def reset(self) -> None:
        """Record that it has responded."""
        self._patience.reset()
        self._delays, self._told = _delays(), False


_AWAITED: ContextVar[AwaitedServer | None] = ContextVar("awaited", default=None)


def awaited_server() -> AwaitedServer | None:
    """Return the server that this thread waits for; None if it must not wait."""
    return _AWAITED.get()


@contextlib.contextmanager
def waiting(seconds: float, tell: Callable[[str], object] = lambda _: None) -> Iterator[None]:
    """Let this thread's requests to a tracking server wait while the server is down.

    Args:
        seconds: how long it may be down at a time.
        tell: called once for each time that it is down, with the reason.
    """
    token = _AWAITED.set(AwaitedServer(seconds, tell))
    try:
        yield
    finally:
        _AWAITED.reset(token)


def patiently(
    call: Callable[[], T],
    *,
    wait: Callable[[float], object] = time.sleep,
    away: float | None = None,
    tell: Callable[[SteadytrainError], object] = lambda _: None,
) -> T:
    """Retry a call until the server responds and no longer denies it.

    Errors that last longer than `away` or DENIED_SECONDS are raised. Permanent errors are raised at
    once.

    Args:
        call: the call.
        wait: waits a number of seconds between two calls.
        away: seconds that the server may be unavailable; AWAY_SECONDS unless given.
        tell: called before each wait, with the error.
    """
    away = AWAY_SECONDS if away is None else away
    patience, delays = Patience(away=away, denied=min(away, DENIED_SECONDS)), _delays()
    while True:
        try:
            return call()
        except SteadytrainError as error:
            if not patience.bears(error):
                raise
            tell(error)
        wait(next(delays))


def retry_rejected(
    call: Callable[[], T],
    seconds: float = REFUSED_SECONDS,
    tell: Callable[[StorageError], object] = lambda _: None,
) -> T:
    """Retry a read or a write until storage accepts it.

    After `seconds`, raise its error. If no retry can help, raise it at once.

    Args:
        call: the read or write.
        seconds: how long to retry it.
        tell: called before the first retry, with the error.
    """
    end, told = time.monotonic() + seconds, False
    while True:
        try:
            return call()
        except StorageError as error:
            if error.lasting or time.monotonic() >= end:
                raise
            if not told:
                tell(error)
                told = True
        time.sleep(_REFUSED_DELAY)


def _delays() -> Iterator[float]:
    """Yield the seconds to wait before each further call."""
    delay = _FIRST_DELAY
    while True:
        yield delay
        delay = min(2 * delay, _LONGEST_DELAY)
