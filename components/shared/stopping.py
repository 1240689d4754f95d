"""Requests to stop, from signals and the lifeline, wherever the process is in its work."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from functools import cache
from types import FrameType

from steadytrain.components.shared.errors import Stopped
from steadytrain.components.shared.lifeline import tether

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_MAY_BE_IGNORED = (signal.SIGHUP, signal.SIGQUIT)
"""nohup, and shells that start background jobs, set these signals to be ignored. They stay
ignored."""
_HANDLERS = threading.Lock()
"""Held while handlers are restored, so that the lifeline does not send SIGTERM to the default
handler, which kills the process."""


@contextlib.contextmanager
def stop_signals(handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    """Pass every stop signal to `handler`. Outside the main thread, this does nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    taken = [
        number
        for number in STOP_SIGNALS
        if not (number in _MAY_BE_IGNORED and before[number] is signal.SIG_IGN)
    ]
    try:
        for number in taken:
            signal.signal(number, handler)
        yield
    finally:
        with _HANDLERS:
            for number in taken:
                signal.signal(number, before[number] or signal.SIG_DFL)


class Stopping:
    """Whether this process was asked to stop."""

    def __init__(self) -> None:
        self._asked: int | None = None

    def check(self) -> None:
        """Check at each step of long work, and right before anything that cannot be undone.

        An exception from a signal handler is lost if a library catches everything or a destructor
        is running. The request itself is kept.

        Raises:
            Stopped: if this process was asked to stop, or the process that started it has died.
        """
        if self._asked is None:
            held = tether()
            self._asked = signal.SIGTERM if held is not None and held.cut() else None
        if self._asked is not None:
            raise Stopped(self._asked)

    def leave(self, number: int, _: FrameType | None) -> None:
        self._asked = self._asked or number
        self.check()


@contextlib.contextmanager
def stoppable() -> Iterator[Stopping]:
    """Turn a request to stop into an exception, so that unfinished work is undone.

    Raises:
        Stopped: also immediately, if the request came before.
    """
    stopping = Stopping()
    with stop_signals(stopping.leave):
        _obey_lifeline()
        stopping.check()
        yield stopping


@cache
def _obey_lifeline() -> None:
    """From now on, send this process SIGTERM when the lifeline ends, if SIGTERM is handled."""
    held = tether()
    main = threading.main_thread().ident

    def interrupt() -> None:
        with _HANDLERS:
            if main is not None and callable(signal.getsignal(signal.SIGTERM)):
                signal.pthread_kill(main, signal.SIGTERM)

    if held is not None:
        held.watch(interrupt)
