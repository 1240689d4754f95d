"""Retry what fails for a moment: requests to servers, reads and writes of storage."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

from steadytrain.components.shared.errors import SteadytrainError, StorageError

T = TypeVar("T")

AWAY_SECONDS = 180.0
"""How long a server may be unavailable, if nothing can continue without it."""
DENIED_SECONDS = 45.0
"""How long a server may deny requests (401, 403), if nothing can continue without them. A starting
server denies everything until it has read tokens and roles, and authorizing webhooks cache a denial
for 30 s."""
REJECTED_SECONDS = 60.0
"""How long storage may reject a write that the run cannot continue without."""
FOREVER: Final = math.inf
DELAYS = (0.5, 8.0)
"""Seconds before the second try, and at most between two tries. Each wait is twice the last one."""


def is_passing(error: Exception) -> bool:
    """Return whether a server may be back in a moment."""
    return isinstance(error, SteadytrainError) and error.passing


def is_rejected(error: Exception) -> bool:
    """Return whether storage rejected a read or a write that it may accept in a moment."""
    return isinstance(error, StorageError) and not error.lasting


def any_error(error: Exception) -> bool:  # noqa: ARG001
    """Return True: the caller goes on and tries again, whatever failed."""
    return True


class Retry:
    """Decides whether to try again after an error, and when.

    Calling it with a function repeats that function. It remembers since when errors last, so one
    instance also serves several calls, and callers with a loop of their own.

    Args:
        transient: whether an error may pass.
        seconds: how long such errors may last; AWAY_SECONDS unless given.
        denied_seconds: how long a server may deny requests; DENIED_SECONDS unless given, and at
            most `seconds`.
        tries: how often to try.
        delays: as DELAYS, which is the default.
        wait: waits a number of seconds.
        report: receives the reason once, before the first wait of each outage.
    """

    def __init__(
        self,
        *,
        transient: Callable[[Exception], bool] = is_passing,
        seconds: float | None = None,
        denied_seconds: float | None = None,
        tries: float = math.inf,
        delays: tuple[float, float] | None = None,
        wait: Callable[[float], object] = time.sleep,
        report: Callable[[str], object] = lambda _: None,
    ) -> None:
        self.transient, self.tries, self.wait, self.report = transient, tries, wait, report
        self.seconds = AWAY_SECONDS if seconds is None else seconds
        denied = DENIED_SECONDS if denied_seconds is None else denied_seconds
        self.denied_seconds, self.delays = min(self.seconds, denied), delays or DELAYS
        self.reset()

    def reset(self) -> None:
        """Record a success: the next error starts a new outage."""
        self.failures, self._since = 0, dict[bool, float]()
        self._delay, self._due = self.delays[0], 0.0

    @property
    def due(self) -> bool:
        """Whether the wait after the last error is over."""
        return time.monotonic() >= self._due

    def may_pass(self, error: Exception) -> bool:
        """Record an error. Return whether to try again, once that is due."""
        now, passing = time.monotonic(), self.transient(error)
        self.failures += 1
        if passing:
            # A server that comes back after being unavailable denies requests at first.
            self._since.pop(False, None)
        elif not getattr(error, "denied", False):
            return False
        limit = self.seconds if passing else self.denied_seconds
        left = self._since.setdefault(passing, now) + limit - now
        if left <= 0 or self.failures >= self.tries:
            return False
        if self.failures == 1:
            self.report(error.message if isinstance(error, SteadytrainError) else str(error))
        self._due = now + min(self._delay, left)
        self._delay = min(2 * self._delay, self.delays[1])
        return True

    def pause(self) -> None:
        """Wait until the next try is due."""
        self.wait(max(0.0, self._due - time.monotonic()))

    def __call__(self, call: Callable[[], T]) -> T:
        """Return what `call` returns. Raise its error if that is permanent or lasts too long."""
        while True:
            try:
                result = call()
            except Exception as error:
                if not self.may_pass(error):
                    raise
            else:
                self.reset()
                return result
            self.pause()


def retry(call: Callable[[], T], **options: Any) -> T:
    """Repeat a call while it fails for a moment. The options are those of `Retry`."""
    return Retry(**options)(call)


def retry_storage(call: Callable[[], T], seconds: float = REJECTED_SECONDS, **options: Any) -> T:
    """Repeat a read or a write until storage accepts it, for at most `seconds`."""
    return retry(call, transient=is_rejected, seconds=seconds, **options)


@dataclass(frozen=True)
class RequestContext:
    """The limits of this thread's HTTP requests.

    It is a context because MLflow and other libraries send the requests, so that no argument
    reaches the connection. `deadline`, `waiting` and a session's adapter set it for a block.

    until: end of the requests, on the monotonic clock.
    retry: how to wait while the tracking server is down; None if requests must not wait.
    in_pieces: whether the answer is received piece by piece, so that its size has no limit.
    once: whether urllib3 sends a request only once, because `retry` repeats it.
    """

    until: float = math.inf
    retry: Retry | None = None
    in_pieces: bool = False
    once: bool = False


_CONTEXT: ContextVar[RequestContext] = ContextVar("requests", default=RequestContext())  # noqa: B039  immutable


def request_context() -> RequestContext:
    """Return the limits of this thread's requests."""
    return _CONTEXT.get()


@contextlib.contextmanager
def requests_with(**changes: Any) -> Iterator[None]:
    """Change fields of this thread's `RequestContext` for a block."""
    token = _CONTEXT.set(replace(_CONTEXT.get(), **changes))
    try:
        yield
    finally:
        _CONTEXT.reset(token)


def waiting(
    seconds: float, report: Callable[[str], object] = lambda _: None
) -> AbstractContextManager[None]:
    """Let this thread's requests to a tracking server wait while the server is down.

    Args:
        seconds: how long it may be down at a time.
        report: called once for each time that it is down, with the reason.
    """
    return requests_with(retry=Retry(seconds=seconds, report=report))
