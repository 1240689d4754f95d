"""Which way to train fits, and with which micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from steadytrain.components.shared.errors import BadInput
from steadytrain.components.train.plan.batch import (
    LARGEST_DERIVED,
    REPLICATED,
    BatchPlan,
    plan_batch,
)
from steadytrain.components.train.plan.machine import Job
from steadytrain.components.train.plan.memory import Memory, peak_memory
from steadytrain.components.train.plan.setting import Setting
from steadytrain.components.train.plan.strategy import Way, ways

LARGEST_MICRO_BATCH: Final = 64
ENOUGH_TOKENS: Final = 2048
"""Of a micro-batch, from which matrix products keep a GPU busy: an assumption. A way that fits
fewer gives way to the next, which needs less memory for each."""

SPARE: Final = 0.05
"""Of a GPU's memory, for what the formula's mean error may be."""

HOST_SPARE: Final = 0.1
"""Of a node's own memory, for the system and the processes themselves: an assumption."""


_TRIES: Final = 3
"""Dry runs, at the most: each that says no is more than the formula was wrong by before."""


@dataclass(frozen=True)
class Choice:
    """A way, how it cuts the batch, and the memory that it needs.

    memory: of a rank.
    host_needed: bytes of a node's own memory, by all its ranks.
    host_capacity: that it has; None: not known.
    learned: why, by field, where an earlier run has found out that it must be less.
    """

    way: Way
    setting: Setting
    batch: BatchPlan
    memory: Memory
    capacity: int
    host_needed: int
    host_capacity: int | None
    learned: Mapping[str, str] = field(default_factory=dict)

    @property
    def plan(self) -> BatchPlan:
        """How a run begins with it."""
        way = self.way
        return replace(
            self.batch,
            gradient_checkpointing=way.recompute,
            strategy=REPLICATED if way.strategy == "single" else way.strategy,
            offload=way.offload,
        )

    @property
    def usable(self) -> int:
        """Bytes of a GPU that a plan counts on."""
        return int((1 - SPARE) * self.capacity)

    @property
    def host_usable(self) -> int | None:
        """Bytes of a node's own memory, likewise."""
        return None if self.host_capacity is None else int((1 - HOST_SPARE) * self.host_capacity)

    @property
    def fits_gpu(self) -> bool:
        return self.memory.total <= self.usable

    @property
    def fits_host(self) -> bool:
        return self.host_usable is None or self.host_needed <= self.host_usable

    @property
    def fits(self) -> bool:
        return self.fits_gpu and self.fits_host

    @property
    def shortage(self) -> float:
        """What is needed over what there is, of the memory that is the shorter one."""
        host = self.host_needed / self.host_usable if self.host_usable else 0.0
        return max(self.memory.total / self.usable, host)


Measure = Callable[[Choice], Memory]


def choose(job: Job, candidates: Sequence[Way]) -> Choice:
    """The first way that fits with a good micro-batch, else the first that fits at all, else the
    one that lacks least: rather of the host's memory than of the GPU's.

    Args:
        candidates: one at the least.

    Raises:
        BadInput: the user's batch cannot be cut that way, or adapters go to layers that the model
            does not have.
    """
    best = [_best(job, way) for way in candidates]
    good = (found for found in best if found.fits and _busy(job, found))
    fitting = (found for found in best if found.fits)
    least = min(best, key=lambda found: (not found.fits_gpu, found.shortage))
    return next(good, None) or next(fitting, None) or least


def confirmed(job: Job, choosing: Callable[[Job], Choice], measure: Measure) -> Choice:
    """A choice with memory that is measured; where that is too much, the next that fits.

    Args:
        choosing: by the formula's memory.
        measure: memory of a rank, of which the formula's is an estimate.
    """
    tight, capacity = job, job.machine.gpu.memory
    for _ in range(_TRIES):
        estimated = choosing(tight)
        found = replace(estimated, memory=measure(estimated), capacity=capacity)
        if found.fits or not estimated.fits:
            break
        # As much less as the formula was wrong by.
        tight = _with_less(tight, estimated.memory.total / found.memory.total)
    return found


def _with_less(job: Job, share: float) -> Job:
    gpu = job.machine.gpu
    smaller = gpu.model_copy(update={"memory_gb": gpu.memory_gb * share})
    return replace(job, machine=replace(job.machine, gpu=smaller))


def fitting(job: Job, candidates: Sequence[Way]) -> Choice | None:
    """The same, where there is a candidate at all and it fits.

    Raises:
        BadInput: as for `choose`.
    """
    found = choose(job, candidates) if candidates else None
    return found if found and found.fits else None


def works(job: Job) -> Choice | None:
    """What fits, where the hosts have the machine and the batch can be cut for its ranks."""
    try:
        return fitting(job, ways(job)) if job.is_available else None
    except BadInput:
        return None


def at(job: Job, way: Way, micro_batch: int, *, length: int | None = None) -> Choice:
    """One way with one micro-batch."""
    config, ranks = job.config, job.machine.ranks
    batch = plan_batch(job.global_batch, ranks, micro_batch)
    setting = Setting(
        length=length or config.data.sequence_length,
        micro_batch=micro_batch,
        precision=job.precision,
        recompute=way.recompute,
        # Labelled texts are padded; of a compiled model packed rows too, which have a mask then.
        masked=job.shape.labels > 0 or config.training.torch_compile,
        accumulates=batch.gradient_accumulation_steps > 1,
        strategy=way.strategy,
        ranks=ranks,
        offload=way.offload,
        adapter=config.model.adapter.model_copy(update={"kind": way.adapter}),
        optim=way.optim,
        cuda=job.machine.gpu.cuda,
    )
    memory, machine = peak_memory(job.shape, setting), job.machine
    host_needed = memory.host * machine.per_node
    return Choice(way, setting, batch, memory, machine.gpu.memory, host_needed, machine.host_memory)


def _best(job: Job, way: Way) -> Choice:
    """With the largest micro-batch that fits, or with the smallest."""
    sizes = list(_micro_batches(job))
    found = (at(job, way, size) for size in sizes)
    return next((choice for choice in found if choice.fits), None) or at(job, way, sizes[-1])


def _micro_batches(job: Job) -> Iterable[int]:
    """The largest first; the user's alone, where there is one."""
    if job.config.training.micro_batch_size is not None:
        return (job.config.training.micro_batch_size,)
    if job.short_of_memory:
        return (1,)
    share = plan_batch(job.global_batch, job.machine.ranks, limit=1).gradient_accumulation_steps
    largest = min(share, LARGEST_MICRO_BATCH if job.machine.gpu.cuda else LARGEST_DERIVED)
    return (size for size in range(largest, 0, -1) if share % size == 0)


def _busy(job: Job, choice: Choice) -> bool:
    largest = max(_micro_batches(job))
    return choice.setting.tokens >= ENOUGH_TOKENS or choice.setting.micro_batch == largest
