"""Decisions and endings as the events that the ledger keeps."""

from __future__ import annotations

from dataclasses import replace

from steadytrain.components.shared.events.types import AttemptEnded, DecisionMade
from steadytrain.components.train.failures import Failure
from steadytrain.components.train.recovery.outcome import Ending
from steadytrain.components.train.recovery.policy import RecoveryDecision


def decision_made(attempt: int, failure: Failure, decision: RecoveryDecision) -> DecisionMade:
    """Build the event for the decision after a failed attempt."""
    return DecisionMade(
        attempt=attempt,
        failure_class=failure.failure_class,
        action=decision.action,
        reason=decision.reason,
        delay_seconds=decision.delay_seconds,
        batch=decision.batch,
        fallback=decision.fallback,
        skipped_batch=decision.skipped_batch,
        learning_rate_scale=decision.learning_rate_scale,
        nodes=decision.nodes,
        on_demand=decision.on_demand,
    )


def attempt_ended(
    number: int, step: int, ending: Ending, seconds: float, waited_seconds: float = 0.0
) -> AttemptEnded:
    """Build the event for the end of an attempt after `step` optimizer steps and some seconds.

    Args:
        waited_seconds: as in the event.
    """
    ended = AttemptEnded(
        attempt=number,
        outcome=ending.outcome,
        step=step,
        seconds=seconds,
        waited_seconds=waited_seconds,
    )
    failure = ending.failure
    if failure is None:
        return ended
    return replace(
        ended,
        failure_class=failure.failure_class,
        message=failure.message,
        remedy=failure.remedy,
        still_since=failure.still_since,
        failed_step=failure.step,
        unexplained=failure.unexplained,
        memory_needed=failure.memory_needed,
    )
