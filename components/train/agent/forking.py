"""Fork processes from one that has already imported everything.

A fork takes milliseconds; a new process spends many seconds on importing torch and Transformers.
Forks share the memory of the imported modules until someone writes to it.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import multiprocessing.process
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NoReturn

import psutil

from steadytrain.components.shared.output_log import open_log, redact_output
from steadytrain.components.shared.stopping import STOP_SIGNALS

SINGLE_THREADED = {
    "OPENBLAS_NUM_THREADS": "1",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
}
"""Variables that keep libraries from starting threads on import: a process with several threads
cannot be forked."""
_CUDA_NOT_INITIALIZED = 3  # CUresult, cuda.h
_context = multiprocessing.get_context("fork")
_possible = False


def possible() -> bool:
    """Return whether this process descends from a prepared one, so that a fork is good enough."""
    return _possible


def prepare(modules: Iterable[str]) -> None:
    """Import the modules that forked processes need. Call this once, before the first fork."""
    with without_collection():
        for module in modules:
            importlib.import_module(module)
    global _possible
    _possible = freeze("ranks")
    # Forks are asked to stop individually, and must not run their parent's handlers.
    os.register_at_fork(after_in_child=_forget_signals)


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """Import without garbage collection, whose search of all that stays takes over a second."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def freeze(what: str) -> bool:
    """Keep this process's memory shared with its forks. Call this after all imports.

    Args:
        what: what will be forked, as a plural noun.

    Returns:
        Whether a fork is as good as a new process. If not, the reason is printed.
    """
    # Memory that the garbage collector never touches is never written to, and stays shared.
    gc.freeze()
    obstacles = list(_obstacles())
    for obstacle in obstacles:
        start_process(what, obstacle)
    return not obstacles


def start_process(what: str, reason: object) -> None:
    """Report why processes are not forked."""
    print(f"{what} are started as new processes instead of forked: {reason}", file=sys.stderr)


class Forked:
    """A forked process with an interface like subprocess.Popen.

    Args:
        main: runs in the fork; returns the exit status.
        environment: the fork's complete environment.
    """

    def __init__(self, main: Callable[[], int], environment: Mapping[str, str]) -> None:
        self._process = _context.Process(target=_become, args=(main, environment))
        self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def poll(self) -> int | None:
        """Return the exit status (negative: a signal), or None while the process runs."""
        return self._process.exitcode

    def wait(self) -> None:
        """Wait until the process has ended."""
        self._process.join()

    def kill(self) -> None:
        """Send SIGKILL."""
        self._process.kill()

    def abandon(self) -> None:
        """Do not wait for the process when this one exits, because it cannot be killed."""
        multiprocessing.process._children.discard(self._process)  # type: ignore[attr-defined]


def write_to(log: Path) -> None:
    """Redirect this process's output to the end of a file, without secrets."""
    descriptor = open_log(log)
    os.dup2(descriptor, sys.stdout.fileno())
    os.dup2(descriptor, sys.stderr.fileno())
    os.close(descriptor)
    redact_output()


def leave(status: int) -> NoReturn:
    """End this fork at once.

    At its usual end, the interpreter takes apart all that was imported, which copies the memory.
    A full disk takes the last lines of output, but not the status.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(status)


def _become(main: Callable[[], int], environment: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    sys.exit(main())


def _forget_signals() -> None:
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_DFL)


def _obstacles() -> Iterator[str]:
    """Yield the reasons why a fork of this process would not be as good as a new process."""
    if sys.platform != "linux":
        yield f"libraries of {sys.platform} do not support it"
    elif (threads := len(psutil.Process().threads())) > 1:
        # A lock held by one of these threads would stay locked in the fork forever.
        yield f"imported modules have started {threads - 1} other threads"
    if _cuda_initialized():
        yield "imported modules have initialized CUDA"


def _cuda_initialized() -> bool:
    """Return whether anything in this process called cuInit: after that, CUDA fails in a fork."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return int(cuda.cuDeviceGetCount(ctypes.byref(ctypes.c_int()))) != _CUDA_NOT_INITIALIZED
