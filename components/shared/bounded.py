"""A cache for short texts that occur often, such as words and pieces of words."""

from __future__ import annotations

import contextlib
import re
import resource
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, NoReturn, TypeVar

from steadytrain.components.shared.errors import BadInput, SteadytrainError
from steadytrain.components.shared.quantities import duration, size

V = TypeVar("V")

MOST: Final = 1 << 17
LONGEST: Final = 48
"""Maximum length of a cached text. Together with MOST, the maximum number, it limits memory."""


class Remembered(dict[str, V]):
    """Caches the results of a function of a text. A full cache is cleared.

    It is a dictionary, because lookups in anything else are slower.
    """

    def __init__(self, function: Callable[[str], V]) -> None:
        super().__init__()
        self._function = function

    def __missing__(self, text: str) -> V:
        result = self._function(text)
        if len(text) <= LONGEST:
            if len(self) >= MOST:
                self.clear()
            self[text] = result
        return result


# Limit what someone else's code may use, such as a tokenizer's chat template.
#
# A sandbox keeps such code away from files and networks, but does not prevent endless loops or a
# string of ten gigabytes.

CPU_SECONDS: Final = 10.0
MEMORY_BYTES: Final = 1 << 30
OVERRUNS: Final = 3
_overruns = 0


class _TooCostly(BaseException):
    """Raised in the block when its time is up. Code that catches Exception does not catch it."""


@contextlib.contextmanager
def bounded(what: str) -> Iterator[None]:
    """Limit the CPU time (on the main thread) and the memory that a block uses.

    Raises:
        BadInput: if it used more.
        SteadytrainError: if this has happened OVERRUNS times in this process.
    """
    try:
        with _timed(), _limited():
            yield
    except (_TooCostly, MemoryError) as error:
        raise _refusal(what) from error


def _refusal(what: str) -> SteadytrainError:
    global _overruns
    _overruns += 1
    cost = f"{what} takes more than {duration(CPU_SECONDS)} of CPU time or {size(MEMORY_BYTES)}"
    if _overruns < OVERRUNS:
        return BadInput(f"{cost} for one record", remedy="shorten the record")
    return SteadytrainError(
        f"{cost} for each of {_overruns} records", remedy="use another chat template"
    )


@contextlib.contextmanager
def _timed() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        # Only the main thread receives signals.
        yield
        return

    def leave(*_: object) -> NoReturn:
        raise _TooCostly

    before = signal.signal(signal.SIGVTALRM, leave)
    try:
        signal.setitimer(signal.ITIMER_VIRTUAL, CPU_SECONDS)
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


@contextlib.contextmanager
def _limited() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    wanted = data_bytes() + MEMORY_BYTES
    if soft != resource.RLIM_INFINITY and soft <= wanted:
        yield
        return
    resource.setrlimit(resource.RLIMIT_DATA, (wanted, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def data_bytes() -> int:
    """Return how much memory this process has allocated, as counted by the kernel."""
    return _status_bytes("VmData")


def peak_memory() -> int:
    """Return the most resident bytes of this process; 0 if this system does not say it."""
    with contextlib.suppress(OSError):
        return _status_bytes("VmHWM")
    return 0


def _status_bytes(field: str) -> int:
    """Return a size in this process's status (proc(5)); 0 if the field is missing."""
    match = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(match[1]) << 10 if match else 0
