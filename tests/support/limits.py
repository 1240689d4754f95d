"""A real limit on this process's memory, under which torch's allocator raises its own error."""

from __future__ import annotations

import contextlib
import ctypes
import re
import resource
from collections.abc import Iterator
from pathlib import Path


def return_freed_memory() -> None:
    """Return freed large blocks to the kernel, so that they can't be reused."""
    ctypes.CDLL(None).mallopt(-3, 1 << 20)


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
