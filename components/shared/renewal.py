"""Signs of life through storage: a thread renews what this process holds, and observers watch it.

Only the observer's own clock counts, so the machines' clocks do not have to agree.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

from steadytrain.components.shared.errors import StorageError
from steadytrain.components.shared.periodic import Periodic

RENEWALS = 8
"""Number of renewals in the time after which silence counts as death."""


class Renewed:
    """Renews something from a thread until it is ended or lost.

    Args:
        renew: called again and again. Returns False if another process has taken over. If storage
            fails, the next renewal may succeed.
        every: seconds between two renewals.
    """

    def __init__(self, renew: Callable[[], bool], *, every: float, name: str) -> None:
        self._renew = renew
        self._thread = Periodic(name, self._work, every=every)

    @property
    def lost(self) -> bool:
        """Whether another process has taken over, as of the last renewal."""
        return not self._thread.alive

    def end(self) -> None:
        """Stop renewing. No renewal is in progress afterwards."""
        self._thread.end()

    def _work(self) -> bool:
        with contextlib.suppress(StorageError, OSError):
            return self._renew()
        return True


class Pulse:
    """Measures how long a value has not changed, by the observer's monotonic clock."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.seen: object = None
        self.since = clock()

    def silence(self, seen: object) -> float:
        """Return the seconds since the value `seen` was first observed."""
        now = self.clock()
        if seen != self.seen:
            self.seen, self.since = seen, now
        return now - self.since

    def excuse(self) -> None:
        """Start over: the observer could not have noticed a change."""
        self.since = self.clock()
