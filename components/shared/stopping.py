"""Requests to stop: from signals, as requests that a loop can poll, and from the parent process."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from types import FrameType
from typing import TYPE_CHECKING

from steadytrain.components.shared.errors import Stopped

if TYPE_CHECKING:
    # Importing it takes a third of a second, which every command would wait.
    from steadytrain.components.shared.events.types import AttemptOutcome

VARIABLE = "STEADYTRAIN_LIFELINE"
"""Environment variable that holds the descriptor of the child's read end."""
_PR_SET_PDEATHSIG = 1  # prctl(2), Linux


class Lifeline:
    """The parent's side.

    descriptor: the read end. Pass it to the child together with VARIABLE.
    """

    def __init__(self) -> None:
        self.descriptor, self._writing = os.pipe()

    def cut(self) -> None:
        """Ask every child to stop. Safe to call repeatedly and from a signal handler."""
        os.write(self._writing, b"stop")

    def close(self) -> None:
        os.close(self._writing)
        os.close(self.descriptor)


class Tether:
    """The child's side."""

    def __init__(self, descriptor: int) -> None:
        os.set_inheritable(descriptor, False)
        self._descriptor = descriptor

    def cut(self) -> bool:
        """Return whether the parent wants this process to stop, or is dead."""
        return self._readable(0)

    def watch(self, act: Callable[[], object]) -> None:
        """Call `act` in a thread when the lifeline is cut."""

        def wait() -> None:
            self._readable(None)
            act()

        threading.Thread(target=wait, name="lifeline", daemon=True).start()

    def _readable(self, milliseconds: int | None) -> bool:
        # A new object for each call: while one thread polls an object, no other thread can use it.
        poll = select.poll()
        poll.register(self._descriptor, select.POLLIN)
        return bool(poll.poll(milliseconds))


@cache
def tether() -> Tether | None:
    """Return this process's own tether; None if no parent holds it by a lifeline."""
    # Remove the variable: in child processes, the descriptor means something else.
    descriptor = os.environ.pop(VARIABLE, "")
    return Tether(int(descriptor)) if descriptor else None


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent dies.

    The parent is the thread that started the process, so call this in a process that a main thread
    started. On systems other than Linux, it does nothing.
    """
    if not sys.platform.startswith("linux"):
        return
    parent = os.getppid()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    # The parent may have died before the call.
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


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
        self._signal: int | None = None

    def check(self) -> None:
        """Check at each step of long work, and right before anything that cannot be undone.

        An exception from a signal handler is lost if a library catches everything or a destructor
        is running. The request itself is kept.

        Raises:
            Stopped: if this process was asked to stop, or the process that started it has died.
        """
        if self._signal is None:
            held = tether()
            self._signal = signal.SIGTERM if held is not None and held.cut() else None
        if self._signal is not None:
            raise Stopped(self._signal)

    def leave(self, number: int, _: FrameType | None) -> None:
        self._signal = self._signal or number
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
    """Send this process SIGTERM when the lifeline ends, if SIGTERM is handled."""
    held = tether()
    main = threading.main_thread().ident

    def interrupt() -> None:
        with _HANDLERS:
            if main is not None and callable(signal.getsignal(signal.SIGTERM)):
                signal.pthread_kill(main, signal.SIGTERM)

    if held is not None:
        held.watch(interrupt)


_BY_HAND = (signal.SIGINT, signal.SIGQUIT)


@dataclass
class StopRequest:
    """A request to stop this process.

    outcome: the outcome to report; None if nobody asked to stop.
    urgent: asked more than once, so stop without the grace period.
    """

    outcome: AttemptOutcome | None = None
    urgent: bool = False
    requested: threading.Event = field(default_factory=threading.Event)

    def request(self, outcome: AttemptOutcome) -> None:
        """Ask to stop. The outcome of the first request stays."""
        self.urgent = self.outcome is not None
        self.outcome = self.outcome or outcome
        self.requested.set()

    def wait(self, seconds: float) -> bool:
        """Wait until someone asks to stop, at most `seconds`. Return whether someone did."""
        return self.requested.wait(seconds)


@contextlib.contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """Record stop signals while the context is active. Only the main thread can receive them."""
    request = StopRequest()

    def note(number: int, _: FrameType | None) -> None:
        request.request("stopped" if number in _BY_HAND else "preempted")

    with stop_signals(note):
        yield request
