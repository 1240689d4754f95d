"""Generators for a separate process, which imports them by name."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator


def crash() -> Iterator[int]:
    yield 1
    os.kill(os.getpid(), signal.SIGSEGV)


def counting(count: int) -> Iterator[int]:
    yield from range(count)
