"""The OOM fallbacks: what can be changed when memory runs out, in order.

The global batch, the order of the samples, the learning rates and the number of steps stay the
same. Only the last fallback changes what the model learns, and only where the configuration allows
it (`recovery.min_sequence_length`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

from steadytrain.components.shared.batch import BatchSettings
from steadytrain.components.shared.config.strategies import DISK, fallback_of, strategy_spec
from steadytrain.components.shared.events.types import RecoveryDecision
from steadytrain.components.sizing.batch import BatchPlan
from steadytrain.components.sizing.hardware import CPU
from steadytrain.components.techniques.settings import SMALLER_MICRO_BATCH
from steadytrain.components.train.failures import FailureClass


@dataclass(frozen=True)
class Fallback:
    """An OOM fallback: a change that needs less memory.

    change: returns settings that need less memory; the same ones if nothing is left to reduce.
    memory: the memory that it spares.
    min_ranks: the fewest ranks that it helps.
    before: the strategy that it replaces; "" if it works with every strategy.
    requires: what the configuration must support: the strategy that replaces it, "cpu", or a
        smaller micro-batch.
    effect: what it changes in what the model learns.
    needs_cuda: whether it helps only if the device has memory of its own.
    missing: why it is unavailable; "" if it is available.
    """

    name: str
    change: Callable[[BatchSettings], BatchSettings]
    memory: Literal["device", "host"] = "device"
    min_ranks: int = 1
    before: str = ""
    requires: str = ""
    needs_cuda: bool = False
    missing: str = ""
    effect: str = ""

    def lower(self, plan: BatchPlan) -> BatchPlan | None:
        """Return the plan one step down; None if the fallback does not apply to it."""
        settings = plan.settings
        if plan.world_size < self.min_ranks or self.before not in ("", settings.strategy):
            return None
        changed = self.change(settings)
        return None if changed == settings else plan.limited_to(changed)


def _offloaded(batch: BatchSettings) -> BatchSettings:
    offloads = strategy_spec(batch.strategy).offloads
    # States on disk would not fit into host memory.
    movable = offloads and batch.offload != DISK
    return replace(batch, offload=offloads[-1]) if movable else batch


def _sharding(before: str, after: str) -> Fallback:
    """Return the fallback from a strategy to another one."""
    return Fallback(
        strategy_spec(after).title,
        lambda batch: replace(batch, strategy=after),
        min_ranks=2,
        before=before,
        requires=after,
    )


_IN_PLACE: Final = Fallback(
    "no snapshot in host memory", lambda batch: replace(batch, snapshot=False), memory="host"
)
"""The only one for host memory. The training thread reads rows from memory-mapped files, so there
are no data loader workers to reduce."""
_SMALLER: Final = Fallback(
    SMALLER_MICRO_BATCH,
    lambda batch: replace(batch, micro_batch_size=max(1, batch.micro_batch_size // 2)),
    requires=SMALLER_MICRO_BATCH,
)
_RECOMPUTE: Final = Fallback(
    "activation checkpointing", lambda batch: replace(batch, gradient_checkpointing=True)
)
_OFFLOAD: Final = Fallback(
    # Offloaded weights are updated on the CPU.
    "CPU offload",
    _offloaded,
    requires="cpu",
    needs_cuda=True,
)


@dataclass(frozen=True)
class Lengths:
    """How far sequences may be shortened, in tokens.

    full: of a row as it was prepared.
    least: `recovery.min_sequence_length`.
    """

    full: int
    least: int

    @classmethod
    def of(cls, full: int, least: int | None) -> Lengths | None:
        """Return the lengths; None if the configuration allows no shorter ones."""
        return cls(full, least) if least is not None and least < full else None

    def shorter(self, batch: BatchSettings) -> BatchSettings:
        """Return settings with half the length, but at least the least."""
        half = (batch.sequence_length or self.full) // 2
        return replace(batch, sequence_length=max(self.least, half))


def _shorter(lengths: Lengths) -> Fallback:
    return Fallback(
        "shorter sequences",
        lengths.shorter,
        effect="but longer documents are cut, so the model learns something else",
    )


Conflict = Callable[[str], str]
"""Returns what does not support a feature (`Fallback.requires`), and why; "" if nothing."""


def all_fallbacks(
    strategies: Iterable[str], prefer: str | None = None, lengths: Lengths | None = None
) -> tuple[Fallback, ...]:
    """Return every fallback, in the order in which they are tried.

    Args:
        strategies: those that the run has used.
        prefer: the value of `compute.prefer`.
        lengths: how far sequences may be shortened; None means not at all.
    """
    after = {name: fallback_of(name, prefer) for name in strategies}
    sharding = [_sharding(name, other) for name, other in after.items() if other]
    shorter = [_shorter(lengths)] if lengths else []
    return (_IN_PLACE, _SMALLER, _RECOMPUTE, *sharding, _OFFLOAD, *shorter)


def fallbacks_for(
    kind: FailureClass,
    device: str,
    strategies: Iterable[str],
    *,
    conflict_with: Conflict = lambda _: "",
    prefer: str | None = None,
    lengths: Lengths | None = None,
) -> Sequence[Fallback]:
    """Return the fallbacks that help with what ran out; a CPU's memory is the host's.

    Args:
        strategies, prefer, lengths: as for `all_fallbacks`.
    """
    spared = {"device"} if kind is FailureClass.GPU_OOM else {"host"}
    if device == CPU:
        spared.add("device")
    return [
        replace(fallback, missing=_missing(fallback, device, conflict_with))
        for fallback in all_fallbacks(strategies, prefer, lengths)
        if fallback.memory in spared
    ]


def _missing(fallback: Fallback, device: str, conflict_with: Conflict) -> str:
    """Return why a fallback is unavailable; "" if it is available."""
    if fallback.needs_cuda and device == CPU:
        return "this memory is host memory"
    setting = conflict_with(fallback.requires) if fallback.requires else ""
    return f"not with {setting}" if setting else ""


Estimate = Callable[[BatchPlan], int | None]
_WORTH: Final = 0.98
"""Share of the memory that ran out: a fallback that leaves more in use would waste an attempt."""


def next_fallback(
    plan: BatchPlan,
    fallbacks: Sequence[Fallback],
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


def expected_fallbacks(
    plan: BatchPlan,
    device: str,
    *,
    conflict_with: Conflict,
    prefer: str | None,
    lengths: Lengths | None = None,
) -> list[str]:
    """Return the names of the fallbacks that a run with a plan has, in order."""
    fallbacks: list[str] = []
    used = [plan.settings.strategy]
    while True:
        known = fallbacks_for(
            FailureClass.GPU_OOM,
            device,
            used,
            conflict_with=conflict_with,
            prefer=prefer,
            lengths=lengths,
        )
        step = next_fallback(plan, known)
        if step is None:
            return list(dict.fromkeys(fallbacks))
        fallback, plan = step
        fallbacks.append(fallback.name)
        used.append(plan.settings.strategy)


def _helps(before: int | None, after: int | None) -> bool:
    return before is None or after is None or after <= _WORTH * before


def lower(
    plan: BatchPlan,
    kind: FailureClass,
    fallbacks: Sequence[Fallback],
    estimate: Estimate = lambda _: None,
) -> RecoveryDecision | None:
    """Return the decision to take the next fallback, or None after the last one.

    Args:
        kind: which memory ran out.
        estimate: as for `next_fallback`.
    """
    # No formula covers the host's memory.
    known = estimate if kind is FailureClass.GPU_OOM else lambda _: None
    result = next_fallback(plan, fallbacks, known)
    if result is None:
        return None
    fallback, lowered = result
    return RecoveryDecision(
        "retry_changed",
        f"{kind}: {fallback.name}, micro-batch x accumulation {plan} becomes {lowered}; the global "
        f"batch stays {plan.global_batch_size}"
        f"{', ' if fallback.effect else ''}{fallback.effect}",
        batch=lowered.settings,
        fallback=fallback.name,
    )
