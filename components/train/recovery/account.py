"""What was tried before a run stopped, in words."""

from __future__ import annotations

from collections.abc import Sequence

from steadytrain.components.train.recovery.history import AttemptHistory, History


def account(history: History) -> Sequence[str]:
    """A line for each attempt since the last new checkpoint, and the reason of the last decision.

    Empty where there is nothing to tell but a single attempt's failure.
    """
    lines = [_attempt(attempt) for attempt in history.stalled]
    earlier = len(history.attempts) - len(lines)
    if earlier:
        lines.insert(0, f"{earlier} earlier attempts, before the last new checkpoint")
    decided = [item for item in history.decisions if item.action == "stop"]
    if len(lines) < 2 or not decided:
        return ()
    return [*lines, f"stopped: {decided[-1].reason}"]


def _attempt(attempt: AttemptHistory) -> str:
    started, ended = attempt.started, attempt.ended
    begun = f"attempt {started.attempt}: micro-batch x accumulation {attempt.plan}, "
    begun += f"from step {started.resumed_from_step or 0}"
    if ended is None:
        return begun
    why = f": {ended.failure_class}, {ended.message.partition(chr(10))[0]}" if ended.message else ""
    return f"{begun}, {ended.outcome} at step {ended.step}{why}"
