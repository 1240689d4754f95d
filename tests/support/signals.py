"""Signals as a terminal has them, whoever started the tests."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest


@pytest.fixture
def heard() -> Iterator[None]:
    """Not ignored, as they are under nohup and of what a shell runs in the background."""
    numbers = (signal.SIGHUP, signal.SIGQUIT)
    before = {number: signal.signal(number, signal.SIG_DFL) for number in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
