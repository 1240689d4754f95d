"""What to do about a failure: a pure function of what has happened so far.

- Failures that would happen again (a user's bug, bad data) stop the run at once. An exception of
  unknown class is retried once: a user's bug fails again within seconds, and the same exception
  again counts as one.
- Running out of memory leads to the OOM fallbacks, which don't use the retry budget. After the last
  one, the run stops. The exception is host memory next to a GPU: other processes may have used too
  much of it, so the run retries. A rank alone halves its micro-batch without asking: see
  loop/halving.py.
- If nodes stay missing, the run continues on fewer nodes, down to the configured minimum. Once it
  has saved a checkpoint there, the attempt after its next failure tries all nodes again. If they
  are still missing, the run returns to the fewer nodes at once, and the retry budget is unchanged.
- After a divergence, the run returns to the newest checkpoint. The first time it skips the batch
  where the loss diverged, the second time it lowers the learning rates, the third time it stops.
- If ranks find their checkpoint damaged, the next attempt starts at once from an earlier one.
- A crash in native code is retried like other failures, unless it crashed after the same step
  before.
- Every other failure is retried a limited number of times in a row per class without a new
  checkpoint. A run that makes progress between failures survives any number of them.
- A circuit breaker counts all classes except preemption, which says nothing about the run. When it
  opens, there is one last try after a wait, regardless of retry budgets.

Every count comes from the ledger, so a new supervisor decides as the old one would.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import replace

from steadytrain.components.shared.config import RecoveryConfig
from steadytrain.components.shared.events.types import RecoveryDecision
from steadytrain.components.shared.quantities import duration
from steadytrain.components.sizing.batch import batch_at
from steadytrain.components.sizing.hardware import advice
from steadytrain.components.train.failures import Failure, FailureClass
from steadytrain.components.train.fallbacks import (
    Conflict,
    Estimate,
    Fallback,
    Lengths,
    fallbacks_for,
    lower,
)
from steadytrain.components.train.recovery.history import History

_JITTER_SHARE = 0.25
_LOWER_RATE = 0.1
_UNKNOWN_FAILURES = 2
"""Failures of unknown class in a row without a new checkpoint that stop the run."""


def decide(
    history: History,
    failure: Failure,
    settings: RecoveryConfig = RecoveryConfig(),  # noqa: B008  immutable
    run_id: str = "",
    *,
    conflict_with: Conflict = lambda _: "",
    prefer: str | None = None,
    length: int = 0,
    estimate: Estimate = lambda _: None,
    fallbacks: bool = True,
) -> RecoveryDecision:
    """Decide what to do after the last attempt of the history failed.

    Args:
        run_id: spreads the waits of runs that fail at the same time.
        conflict_with, prefer: see `fallbacks_for`.
        length: tokens of the longest prepared row; 0 if the data don't say.
        estimate: see `next_fallback`.
        fallbacks: whether the OOM fallbacks apply. Without them, running out of memory is retried.
    """
    kind = failure.failure_class
    if not kind.retryable:
        return RecoveryDecision("stop", f"{kind} would happen again")
    if kind is FailureClass.DIVERGENCE:
        return _steady(history, failure)
    answer = None
    if kind is FailureClass.PENDING_TIMEOUT:
        answer = _shrink(history, settings)
    elif kind is FailureClass.CRASH:
        answer = _crash_again(history)
    elif kind is FailureClass.CHECKPOINT_CORRUPT:
        answer = _step_back(history)
    elif fallbacks and _is_short_of_memory(failure):
        lengths = Lengths.of(length, settings.min_sequence_length)
        answer = _lower(history, failure, conflict_with, prefer, lengths, estimate)
    return _grown(history, answer or _retry(history, kind, settings, run_id))


def _crash_again(history: History) -> RecoveryDecision | None:
    """Stop if native code crashed after the same step before."""
    *before, last = [item.ended for item in history.stalled if item.ended]
    if not any(
        (item.failure_class, item.step) == (last.failure_class, last.step) for item in before
    ):
        return None
    return RecoveryDecision(
        "stop", f"{last.failure_class} after step {last.step} again: another retry would not help"
    )


def _step_back(history: History) -> RecoveryDecision | None:
    """Return to the newest intact checkpoint; None if that was already tried."""
    if FailureClass.CHECKPOINT_CORRUPT in _counted(history):
        return None
    return RecoveryDecision(
        "retry",
        f"{FailureClass.CHECKPOINT_CORRUPT}: back to the newest intact checkpoint",
    )


def _is_short_of_memory(failure: Failure) -> bool:
    """Return whether memory ran out. A rank killed for no known reason may have had enough."""
    kind = failure.failure_class
    return kind is FailureClass.GPU_OOM or (
        kind is FailureClass.HOST_OOM and not failure.unexplained
    )


def _lower(
    history: History,
    failure: Failure,
    conflict_with: Conflict,
    prefer: str | None,
    lengths: Lengths | None,
    estimate: Estimate,
) -> RecoveryDecision | None:
    kind, plan = failure.failure_class, history.attempts[-1].plan
    strategies = [attempt.started.batch.strategy for attempt in history.attempts]
    device = history.attempts[-1].started.device
    fallbacks = fallbacks_for(
        kind, device, strategies, conflict_with=conflict_with, prefer=prefer, lengths=lengths
    )
    decision = lower(plan, kind, fallbacks, estimate)
    if decision is not None:
        return decision
    if all(item.memory == "host" for item in fallbacks):
        # Other processes may have used up the host memory, so the run retries.
        return None
    summary = [*_fallback_results(history, fallbacks), advice(failure.memory_needed)]
    tried = "; ".join(filter(None, summary))
    return RecoveryDecision("stop", f"{kind}, and no OOM fallback is left. {tried}")


def _fallback_results(history: History, fallbacks: Sequence[Fallback]) -> Iterator[str]:
    """Yield a line for each fallback: what was tried, and how that ended."""
    attempts = {attempt.started.attempt: attempt for attempt in history.attempts}
    for fallback in fallbacks:
        numbers = [
            decision.attempt + (0 if decision.in_place else 1)
            for decision in history.decisions
            if decision.fallback == fallback.name
        ]
        # One attempt may have halved its micro-batch several times.
        tried = [attempts[number] for number in dict.fromkeys(numbers) if number in attempts]
        ends = [
            f"{attempt.plan} ended with {attempt.ended.failure_class} at step {attempt.ended.step}"
            for attempt in tried
            if attempt.ended
        ]
        result = fallback.missing or ", ".join(ends) or "nothing left to reduce"
        yield f"{fallback.name}: {result}"


def _shrink(history: History, settings: RecoveryConfig) -> RecoveryDecision | None:
    """Use fewer nodes, each with more of the same global batch; None if that is not allowed."""
    last = history.attempts[-1]
    nodes, batch = last.started.nodes, last.plan.global_batch_size
    if history.grows(last.started.attempt):
        fewer = history.attempts[-2].started.nodes
        return RecoveryDecision(
            "retry_changed",
            f"{FailureClass.PENDING_TIMEOUT}: back on {fewer} nodes, because not all {nodes} are "
            f"available yet; the global batch stays {batch}",
            nodes=fewer,
        )
    ranks = last.started.world_size // nodes
    for fewer in range(nodes - 1, (settings.min_nodes or nodes) - 1, -1):
        if batch % (ranks * fewer) == 0:
            return RecoveryDecision(
                "retry_changed",
                f"{FailureClass.PENDING_TIMEOUT}: on {fewer} nodes instead of {nodes} "
                f"(recovery.min_nodes {settings.min_nodes}); the global batch stays {batch}",
                nodes=fewer,
            )
    return None


def _grown(history: History, decision: RecoveryDecision) -> RecoveryDecision:
    """Try all nodes again if the run made progress on fewer. It has to start again anyway."""
    last, wanted = history.attempts[-1], history.configured_nodes
    changed = decision.nodes or decision.batch is not None
    if decision.action == "stop" or changed or not last.checkpoints:
        return decision
    if not history.nodes or wanted is None or last.started.nodes >= wanted:
        return decision
    return replace(
        decision,
        action="retry_changed",
        reason=f"{decision.reason}; tries {wanted} nodes again instead of {last.started.nodes}",
        nodes=wanted,
    )


def _steady(history: History, failure: Failure) -> RecoveryDecision:
    """Respond to a divergence. An unchanged retry would repeat it, because resuming is exact."""
    times = _counted(history).count(FailureClass.DIVERGENCE)
    step = failure.failed_step
    summary = f"divergence after step {step}, {_times(times)} without a new checkpoint"
    if times == 1:
        batch = batch_at(step, history.skipped_batches)
        return RecoveryDecision(
            "retry_changed",
            f"{summary}: back to the newest checkpoint, and global batch {batch} is skipped",
            skipped_batch=batch,
        )
    if times == 2:
        return RecoveryDecision(
            "retry_changed",
            f"{summary}: back to the newest checkpoint, with learning rates times {_LOWER_RATE}",
            learning_rate_scale=_LOWER_RATE,
        )
    return RecoveryDecision(
        "stop", f"{summary}: neither skipping the batch nor a lower learning rate helped"
    )


def _retry(
    history: History, kind: FailureClass, settings: RecoveryConfig, run_id: str
) -> RecoveryDecision:
    counted = _counted(history)
    same = counted.count(kind)
    crashes = len(counted) - counted.count(FailureClass.PREEMPTION)
    if kind is not FailureClass.PREEMPTION and crashes >= settings.breaker_failures:
        return _break(kind, crashes, settings)
    limit = _limit(kind, settings)
    if same >= limit:
        return RecoveryDecision("stop", f"{kind} {_times(same)} in a row without a new checkpoint")
    delay = _delay(same, settings, f"{run_id}/{history.attempts[-1].started.attempt}")
    summary = f"{kind}, {same} of at most {limit} in a row without a new checkpoint"
    if same == limit - 1 and _moves(kind, settings):
        return RecoveryDecision(
            "retry_changed",
            f"{summary}; the last attempt requests on-demand nodes, in {duration(delay)}",
            delay_seconds=delay,
            on_demand=True,
        )
    return RecoveryDecision("retry", f"{summary}; retry unchanged in {duration(delay)}", delay)


def _limit(kind: FailureClass, settings: RecoveryConfig) -> int:
    if kind is FailureClass.PREEMPTION and settings.max_preemptions is not None:
        return settings.max_preemptions
    if kind is FailureClass.UNKNOWN:
        return min(_UNKNOWN_FAILURES, settings.max_failures_per_class)
    return settings.max_failures_per_class


def _moves(kind: FailureClass, settings: RecoveryConfig) -> bool:
    """Return whether nodes that are not preemptible may help and are configured."""
    lost = kind in (FailureClass.PREEMPTION, FailureClass.NODE_LOST)
    return lost and settings.on_demand_at_last


def _break(kind: FailureClass, crashes: int, settings: RecoveryConfig) -> RecoveryDecision:
    summary = f"{kind}, failure {crashes} in a row without a new checkpoint"
    if crashes > settings.breaker_failures:
        return RecoveryDecision("stop", f"{summary}: the circuit breaker's last attempt failed")
    delay = settings.breaker_reset_seconds
    summary = (
        f"{summary}: the circuit breaker is open, and the last attempt starts in {duration(delay)}"
    )
    if _moves(kind, settings):
        return RecoveryDecision(
            "retry_changed", f"{summary}, on on-demand nodes", delay, on_demand=True
        )
    return RecoveryDecision("retry", summary, delay)


def _counted(history: History) -> Sequence[str]:
    """Return the classes of the failures since the last new checkpoint.

    Leaves out failures answered by an OOM fallback or fewer nodes, and the first damaged
    checkpoint.
    """
    answered = history.answered
    counted = [
        attempt.ended.failure_class
        for attempt in history.stalled
        if attempt.ended and attempt.ended.failure_class and attempt.started.attempt not in answered
    ]
    if FailureClass.CHECKPOINT_CORRUPT in counted:
        counted.remove(FailureClass.CHECKPOINT_CORRUPT)
    return counted


def _delay(count: int, settings: RecoveryConfig, name: str) -> float:
    # The exponent is bounded to avoid overflow.
    doubled = settings.backoff_seconds * 2.0 ** min(count - 1, 64)
    delay = min(doubled, settings.backoff_max_seconds)
    if not settings.jitter:
        return delay
    drawn = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8]) / 2**64
    return delay * (1 - _JITTER_SHARE * drawn)


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"
