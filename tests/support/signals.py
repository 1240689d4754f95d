"""Signals as in a terminal, however the tests were started."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest


@pytest.fixture
def heard() -> Iterator[None]:
    """Reset SIGHUP and SIGQUIT, which nohup and background jobs of a shell ignore."""
    numbers = (signal.SIGHUP, signal.SIGQUIT)
    before = {number: signal.signal(number, signal.SIG_DFL) for number in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
