"""How long faults that may pass are waited out: of servers, and of storage."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Final, TypeVar

from steadytrain.components.shared.errors import SteadytrainError, StorageError

T = TypeVar("T")

AWAY_SECONDS = 180.0
"""How long a server may be away, where nothing goes on without it."""
DENIED_SECONDS = 45.0
"""How long it may deny what it is asked (401, 403), where nothing goes on without that. A server
that starts denies everything until it has read tokens and roles, and webhooks that authorize
remember a denial for 30 s."""
REFUSED_SECONDS = 60.0
"""How long storage may refuse a write without which a run cannot go on."""
FOREVER: Final = math.inf
_REFUSED_DELAY = 1.0
_FIRST_DELAY, _LONGEST_DELAY = 0.5, 8.0


class Patience:
    """Bears the faults of one server that may pass.

    Args:
        away: seconds that it may be away. denied: seconds that it may deny what it is asked.
    """

    def __init__(self, *, away: float, denied: float) -> None:
        self.away, self.denied = away, denied
        self._since: dict[str, float] = {}

    def bears(self, error: SteadytrainError) -> bool:
        """Notes a fault; returns whether it may still pass."""
        if error.passing:
            # A server that was away and is coming back denies at first.
            self._since.pop("denied", None)
            return self._lasted("away") < self.away
        return error.denied and self._lasted("denied") < self.denied

    def reset(self) -> None:
        """Notes that the server has answered."""
        self._since.clear()

    def _lasted(self, fault: str) -> float:
        now = time.monotonic()
        return now - self._since.setdefault(fault, now)


def patiently(call: Callable[[], T], *, wait: Callable[[float], object] = time.sleep) -> T:
    """Calls until the server answers, and no longer denies what it is asked.

    What it raises after AWAY_SECONDS or DENIED_SECONDS is raised, and at once what does not pass.

    Args:
        wait: between two calls.
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


def while_refused(call: Callable[[], T], seconds: float = REFUSED_SECONDS) -> T:
    """Calls until storage takes what is written; what it raises after `seconds` is raised."""
    end = time.monotonic() + seconds
    while True:
        try:
            return call()
        except StorageError:
            if time.monotonic() >= end:
                raise
        time.sleep(_REFUSED_DELAY)
