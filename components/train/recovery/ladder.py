"""What can be changed when memory runs out, one rung after another.

No rung changes what is learned: the global batch, the order of the samples, the
learning rates and the number of steps stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from steadytrain.components.train.plan.batch import BatchPlan
from steadytrain.components.train.plan.device import CPU
from steadytrain.components.train.recovery.failures import FailureClass
from steadytrain.components.train.recovery.ledger import History


@dataclass(frozen=True)
class Rung:
    """A change that needs less memory.

    lower: the plan one step further down, or None where this rung has nothing left to give.
    missing: why it cannot be taken at all; "" where it can.
    """

    name: str
    lower: Callable[[BatchPlan], BatchPlan | None]
    missing: str = ""


def _halved(plan: BatchPlan) -> BatchPlan | None:
    return plan.within(plan.micro_batch_size // 2) if plan.micro_batch_size > 1 else None


def _recomputing(plan: BatchPlan) -> BatchPlan | None:
    return None if plan.gradient_checkpointing else replace(plan, gradient_checkpointing=True)


def _nothing(_: BatchPlan) -> BatchPlan | None:
    return None


def _in_place(plan: BatchPlan) -> BatchPlan | None:
    return replace(plan, snapshot=False) if plan.snapshot else None


LADDER = (
    Rung("smaller micro-batch", _halved),
    Rung("activation checkpointing", _recomputing),
    *(
        Rung(name, _nothing, missing="not available yet")
        for name in ("FSDP", "DeepSpeed ZeRO-2", "DeepSpeed ZeRO-3", "CPU offload")
    ),
)
"""The registry of rungs for the memory of a device, in the order in which they are taken."""

HOST_LADDER = (Rung("no snapshot in host memory", _in_place),)
"""For the host's own memory. Rows come from mapped files on the training thread: there are no
loader's workers of which fewer would need less."""


def ladder_for(kind: FailureClass, device: str) -> Sequence[Rung]:
    """The rungs that help, by what ran out; a CPU's memory is the host's."""
    if kind is FailureClass.GPU_OOM:
        return LADDER
    return (*HOST_LADDER, *LADDER) if device == CPU else HOST_LADDER


def next_rung(plan: BatchPlan, ladder: Sequence[Rung] = LADDER) -> tuple[Rung, BatchPlan] | None:
    """The next rung below a plan and the plan there, or None at the foot of the ladder."""
    for rung in ladder:
        lowered = None if rung.missing else rung.lower(plan)
        if lowered is not None:
            return rung, lowered
    return None


def what_came_of_it(history: History, ladder: Sequence[Rung]) -> Iterator[str]:
    """A line for each rung: what was tried on it, and how that ended."""
    attempts = {attempt.started.attempt: attempt for attempt in history.attempts}
    for rung in ladder:
        tried = [
            attempts[decision.attempt + 1]
            for decision in history.decisions
            if decision.rung == rung.name and decision.attempt + 1 in attempts
        ]
        ends = [
            f"{attempt.plan} ended with {attempt.ended.failure_class} at step {attempt.ended.step}"
            for attempt in tried
            if attempt.ended
        ]
        yield f"{rung.name}: {rung.missing or ', '.join(ends) or 'there was nothing to lower'}"
