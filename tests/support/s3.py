"""S3 as the tests have it."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from moto.core.botocore_stubber import BotocoreStubber


def one_request_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes moto's conditional write atomic, as that of S3 is.

    Moto looks whether the object is there, and later writes it: of two threads
    that ask at once, both are told that they were the first.
    """
    answer, turn = BotocoreStubber.__call__, threading.RLock()

    def in_turn(self: BotocoreStubber, *arguments: Any, **named: Any) -> Any:
        with turn:
            return answer(self, *arguments, **named)

    monkeypatch.setattr(BotocoreStubber, "__call__", in_turn)
