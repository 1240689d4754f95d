"""Detect whether the process that started this one still wants it to run.

The lifeline is a pipe: the parent keeps the write end and the child gets the read end. Anything
that arrives means stop, whether the parent wrote it or the kernel closed the pipe because the
parent died. Unlike a signal, it cannot be missed. It stays readable, so a child that checks late
(because it is still importing, for example) still finds it.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
import threading
from collections.abc import Callable
from functools import cache

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


def die_with_parent(with_signal: signal.Signals = signal.SIGKILL) -> None:
    """Ask the kernel to send `with_signal` to this process when its parent dies.

    The parent is the thread that started the process, so call this in a process that a main thread
    started. On systems other than Linux, it does nothing.
    """
    if not sys.platform.startswith("linux"):
        return
    parent = os.getppid()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(with_signal), 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    # The parent may have died before the call.
    if os.getppid() != parent:
        os.kill(os.getpid(), with_signal)
