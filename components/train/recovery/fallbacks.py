"""The OOM fallbacks: what can be changed when memory runs out, in order.

No fallback changes what the model learns: the global batch, the order of the samples, the
learning rates and the number of steps stay the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from steadytrain.components.shared.batch import REPLICATED
from steadytrain.components.sizing.batch import BatchPlan
from steadytrain.components.sizing.device import CPU
from steadytrain.components.train.failures import FailureClass
from steadytrain.components.train.recovery.history import History


@dataclass(frozen=True)
class Fallback:
    """An OOM fallback: a change that needs less memory.

    lower: returns the plan one step down, or None if this fallback has nothing left to reduce.
    missing: why it is unavailable; "" if it is available.
    """

    name: str
    lower: Callable[[BatchPlan], BatchPlan | None]
    missing: str = ""


def _halved(plan: BatchPlan) -> BatchPlan | None:
    half = plan.micro_batch_size // 2
    return plan.within(replace(plan.settings, micro_batch_size=half)) if half else None


def _recomputing(plan: BatchPlan) -> BatchPlan | None:
    return (
        None if plan.settings.gradient_checkpointing else plan.changed(gradient_checkpointing=True)
    )


def _in_place(plan: BatchPlan) -> BatchPlan | None:
    return plan.changed(snapshot=False) if plan.settings.snapshot else None


def _sharding(above: str, strategy: str) -> Callable[[BatchPlan], BatchPlan | None]:
    """Move from one strategy to the next; a single rank has no other rank to share with."""

    def lower(plan: BatchPlan) -> BatchPlan | None:
        shared = plan.settings.strategy == above and plan.world_size > 1
        return plan.changed(strategy=strategy) if shared else None

    return lower


def _offloading(plan: BatchPlan) -> BatchPlan | None:
    own = plan.settings
    wanted = _MOST_OFFLOADED.get(own.strategy, own.offload)
    return None if own.offload == wanted else plan.changed(offload=wanted)


_MOST_OFFLOADED = {"zero1": "optimizer", "zero2": "optimizer", "zero3": "all", "fsdp": "all"}
FSDP = Fallback("FSDP", _sharding(REPLICATED, "fsdp"))
OFFLOAD = Fallback("CPU offload", _offloading)
DEVICE_FALLBACKS = (
    Fallback("smaller micro-batch", _halved),
    Fallback("activation checkpointing", _recomputing),
    FSDP,
    # FSDP shards everything that ZeRO-3 does: these are for users who chose DeepSpeed.
    Fallback("DeepSpeed ZeRO-2", _sharding("zero1", "zero2")),
    Fallback("DeepSpeed ZeRO-3", _sharding("zero2", "zero3")),
    OFFLOAD,
)
"""The fallbacks for device memory, in the order in which they are tried."""

HOST_FALLBACKS = (Fallback("no snapshot in host memory", _in_place),)
"""The fallbacks for host memory. The training thread reads rows from memory-mapped files, so there
are no data loader workers to reduce."""


def fallbacks_for(kind: FailureClass, device: str, *, unsharded: str = "") -> Sequence[Fallback]:
    """Return the fallbacks that help with what ran out; a CPU's memory is the host's.

    Args:
        unsharded: the field that prevents sharding the state; "" if there is none.
    """
    missing = {}
    if unsharded:
        missing[FSDP] = f"not with {unsharded}"
    if device == CPU:
        missing[OFFLOAD] = "this memory is the host's own"
    fallbacks = tuple(
        replace(fallback, missing=missing[fallback]) if fallback in missing else fallback
        for fallback in DEVICE_FALLBACKS
    )
    if kind is FailureClass.GPU_OOM:
        return fallbacks
    return (*HOST_FALLBACKS, *fallbacks) if device == CPU else HOST_FALLBACKS


Estimate = Callable[[BatchPlan], int | None]
_WORTH: Final = 0.98
"""Share of the memory that ran out: a fallback that leaves more in use would waste an attempt."""


def next_fallback(
    plan: BatchPlan,
    fallbacks: Sequence[Fallback] = DEVICE_FALLBACKS,
    estimate: Estimate = lambda _: None,
) -> tuple[Fallback, BatchPlan] | None:
    """Return the next fallback for a plan and the resulting plan, or None after the last one.

    Args:
        estimate: returns the bytes of a rank with a plan; a fallback that it says won't help is
            skipped.
    """
    for fallback in fallbacks:
        lowered = None if fallback.missing else fallback.lower(plan)
        if lowered is not None and _helps(estimate(plan), estimate(lowered)):
            return fallback, lowered
    return None


def _helps(before: int | None, after: int | None) -> bool:
    return before is None or after is None or after <= _WORTH * before


def what_came_of_it(history: History, fallbacks: Sequence[Fallback]) -> Iterator[str]:
    """Yield a line for each fallback: what was tried, and how that ended."""
    attempts = {attempt.started.attempt: attempt for attempt in history.attempts}
    for fallback in fallbacks:
        tried = [
            attempts[decision.attempt + 1]
            for decision in history.decisions
            if decision.fallback == fallback.name and decision.attempt + 1 in attempts
        ]
        ends = [
            f"{attempt.plan} ended with {attempt.ended.failure_class} at step {attempt.ended.step}"
            for attempt in tried
            if attempt.ended
        ]
        result = fallback.missing or ", ".join(ends) or "nothing was left to lower"
        yield f"{fallback.name}: {result}"
