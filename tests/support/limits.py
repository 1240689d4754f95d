"""A real limit on this process's memory, under which torch's allocator raises its own error."""

from __future__ import annotations

import contextlib
import ctypes
import re
import resource
from collections.abc import Iterator
from pathlib import Path

_LARGE = 1 << 20
_THREADS = 200
"""More than a rank has, those of libraries included."""


def return_freed_memory() -> None:
    """Return large blocks to the kernel once they are freed, so that they can't be reused."""
    ctypes.CDLL(None).mallopt(-3, _LARGE)


def address_space() -> int:
    """Return the bytes of this process's address space."""
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"VmSize:\s+(\d+) kB", status)[1]) * 1024


@contextlib.contextmanager
def limited(size: int) -> Iterator[None]:
    """Within this context, this process's address space has at most `size` bytes."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def take_freed_memory() -> None:
    """Take all large blocks that malloc has without the kernel, for good.

    If the kernel has no more memory, malloc takes it from what it reserved for other threads, of
    which it tries one at a time, in turns.
    """
    malloc = ctypes.CDLL(None).malloc
    malloc.restype = ctypes.c_void_p
    with limited(address_space()):
        missed = 0
        while missed < _THREADS:
            missed = 0 if malloc(_LARGE) else missed + 1
