"""What to do about a failure: a pure function of what has happened so far."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from steadytrain.components.train.recovery.failures import Failure
from steadytrain.components.train.recovery.ledger import History


@dataclass(frozen=True)
class Decision:
    """What the supervisor does next.

    action: retry as it is, retry changed, or stop.
    reason: one sentence for people.
    delay_seconds: wait before the retry.
    micro_batch_size: what a changed retry runs with; the global batch stays.
    """

    action: Literal["retry", "retry_changed", "stop"]
    reason: str
    delay_seconds: float = 0.0
    micro_batch_size: int | None = None


def decide(history: History, failure: Failure) -> Decision:
    """The decision after a failed attempt. This version stops at every failure."""
    attempts = len(history.attempts)
    kind = failure.failure_class
    again = "can succeed when the run is started again" if kind.retryable else "would come again"
    return Decision("stop", f"attempt {attempts} ended with {kind}, which {again}")
