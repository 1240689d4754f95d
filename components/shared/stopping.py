"""Requests to stop, as signals and through the lifeline: noticed wherever a process stands."""

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
"""By nohup, and by shells for background jobs; left ignored then."""
_HANDLERS = threading.Lock()
"""Held while handlers are restored, so that no signal of ours meets the default, which kills."""


@contextlib.contextmanager
def stop_signals(handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    """Hands every stop signal to `handler`; does nothing outside of the main thread."""
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
        """To be called at each step of long work, and right before what cannot be undone.

        An exception from a signal handler is lost where a library catches everything, or
        where it reaches a destructor; the request is not.

        Raises:
            Stopped: this process was asked to stop, or the one that started it has died.
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
    """A request to stop leaves the context by an exception, so that what is half done is undone.

    Raises:
        Stopped: also at once, if the request is there already.
    """
    stopping = Stopping()
    with stop_signals(stopping.leave):
        _obey_lifeline()
        stopping.check()
        yield stopping


@cache
def _obey_lifeline() -> None:
    """From now on the end of the lifeline reaches this process as SIGTERM, if that is handled."""
    held = tether()
    main = threading.main_thread().ident

    def interrupt() -> None:
        with _HANDLERS:
            if main is not None and callable(signal.getsignal(signal.SIGTERM)):
                signal.pthread_kill(main, signal.SIGTERM)

    if held is not None:
        held.watch(interrupt)
