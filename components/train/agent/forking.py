"""Processes forked from one that has imported everything already.

A fork takes milliseconds where a new process imports torch and Transformers for many
seconds; the memory of what is imported is shared until it is written to.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import psutil

from steadytrain.components.shared.stopping import STOP_SIGNALS

_CUDA_NOT_INITIALIZED = 3  # CUresult, cuda.h
_context = multiprocessing.get_context("fork")
_possible = False


def possible() -> bool:
    """Whether this process descends from one that was prepared, so that a fork will do."""
    return _possible


def prepare(modules: Iterable[str]) -> None:
    """Imports what those that are forked will need; to be called once, before the first fork."""
    for module in modules:
        importlib.import_module(module)
    # What the collector never looks at is never written to, and so stays shared.
    gc.freeze()
    global _possible
    obstacles = list(_obstacles())
    _possible = not obstacles
    for obstacle in obstacles:
        print(f"ranks are started anew instead of forked: {obstacle}", file=sys.stderr)
    # They are told to leave by themselves, and are not to do what their parent would do then.
    os.register_at_fork(after_in_child=_forget_signals)


class Forked:
    """A forked process, told of as subprocess.Popen does.

    Args:
        main: returns its exit status.
        environment: its own, whole.
        log: file that its output is appended to; None: where its parent's goes.
    """

    def __init__(
        self, main: Callable[[], int], environment: Mapping[str, str], log: Path | None = None
    ) -> None:
        self._process = _context.Process(target=_become, args=(main, environment, log))
        self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def poll(self) -> int | None:
        """Its exit status (negative: a signal), or None while it runs."""
        return self._process.exitcode

    def wait(self) -> None:
        """Returns when it has ended."""
        self._process.join()


def write_to(log: Path) -> None:
    """Appends what this process prints to a file."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, sys.stdout.fileno())
    os.dup2(descriptor, sys.stderr.fileno())
    os.close(descriptor)


def _become(main: Callable[[], int], environment: Mapping[str, str], log: Path | None) -> None:
    os.environ.clear()
    os.environ.update(environment)
    if log is not None:
        write_to(log)
    sys.exit(main())


def _forget_signals() -> None:
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_DFL)


def _obstacles() -> Iterator[str]:
    """Why a fork would not be as good as a new process."""
    if sys.platform != "linux":
        yield f"libraries of {sys.platform} do not bear it"
    elif (threads := len(psutil.Process().threads())) > 1:
        # A lock that one of them holds would be held in the fork for ever.
        yield f"what is imported has begun {threads - 1} other threads"
    if _cuda_initialized():
        yield "what is imported has initialized CUDA"


def _cuda_initialized() -> bool:
    """Whether anything here has called cuInit: CUDA cannot be used in a fork after that."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return int(cuda.cuDeviceGetCount(ctypes.byref(ctypes.c_int()))) != _CUDA_NOT_INITIALIZED
