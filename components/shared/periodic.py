"""Work that a thread repeats, and signs of life through storage."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from steadytrain.components.shared.errors import StorageError


class Periodic:
    """Calls a function every few seconds, in a daemon thread that starts at once.

    Args:
        name: of the thread.
        work: called again and again; False ends the thread.
        every: seconds between two calls.
        finish: called by the thread when its owner ends it.
        around: entered by the thread while it lives.
    """

    def __init__(
        self,
        name: str,
        work: Callable[[], object],
        *,
        every: float,
        finish: Callable[[], object] = lambda: None,
        around: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self._work, self._every, self._finish, self._around = work, every, finish, around
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def end(self, seconds: float | None = None) -> bool:
        """End the thread. Return whether it has ended within some seconds; None waits for it."""
        self._ending.set()
        self._thread.join(seconds)
        return not self.alive

    def _run(self) -> None:
        with self._around():
            while not self._ending.wait(self._every):
                if self._work() is False:
                    return
            self._finish()


def pause(since: float, most: float) -> None:
    """Sleep before the next look at something: at first shortly, since it may end soon.

    Args:
        since: when the looks began, by the monotonic clock.
        most: seconds.
    """
    time.sleep(min(most, 0.02 + (time.monotonic() - since) / 20))


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
