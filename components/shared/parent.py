"""A process that must not outlive the one that started it."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # prctl(2), Linux


def die_with_parent(with_signal: signal.Signals = signal.SIGKILL) -> None:
    """Asks the kernel for `with_signal` when this process's parent dies.

    The parent is the thread that started it, so call this in a process started
    by a main thread. Does nothing on systems other than Linux.
    """
    if not sys.platform.startswith("linux"):
        return
    parent = os.getppid()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(with_signal), 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    # The parent may have died before the request was made.
    if os.getppid() != parent:
        os.kill(os.getpid(), with_signal)
