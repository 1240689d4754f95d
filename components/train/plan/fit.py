"""Which way to train fits, and with which micro-batch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from steadytrain.components.train.plan.batch import LARGEST_DERIVED, BatchPlan, plan_batch
from steadytrain.components.train.plan.machine import Job
from steadytrain.components.train.plan.memory import Memory, peak_memory
from steadytrain.components.train.plan.setting import Setting
from steadytrain.components.train.plan.strategy import Way

LARGEST_MICRO_BATCH: Final = 64
ENOUGH_TOKENS: Final = 2048
"""Of a micro-batch, from which matrix products keep a GPU busy: an assumption. A way that fits
fewer gives way to the next, which needs less memory for each."""

SPARE: Final = 0.05
"""Of a GPU's memory, for what the formula's mean error may be."""


@dataclass(frozen=True)
class Choice:
    """A way, how it cuts the batch, and the memory that a rank needs."""

    way: Way
    setting: Setting
    batch: BatchPlan
    memory: Memory
    capacity: int

    @property
    def usable(self) -> int:
        """Bytes of a GPU that a plan counts on."""
        return int((1 - SPARE) * self.capacity)

    @property
    def fits(self) -> bool:
        return self.memory.total <= self.usable


def choose(job: Job, candidates: Sequence[Way]) -> Choice:
    """The first way that fits with a good micro-batch, else the first that fits at all, else the
    one that lacks least.

    Args:
        candidates: one at the least.

    Raises:
        BadInput: the user's batch cannot be cut that way, or adapters go to layers that the model
            does not have.
    """
    best = [_best(job, way) for way in candidates]
    good = (found for found in best if found.fits and _busy(job, found))
    fitting = (found for found in best if found.fits)
    least = min(best, key=lambda found: found.memory.total)
    return next(good, None) or next(fitting, None) or least


def fitting(job: Job, candidates: Sequence[Way]) -> Choice | None:
    """The same, where there is a candidate at all and it fits.

    Raises:
        BadInput: as for `choose`.
    """
    found = choose(job, candidates) if candidates else None
    return found if found and found.fits else None


def at(job: Job, way: Way, micro_batch: int, *, length: int | None = None) -> Choice:
    """One way with one micro-batch."""
    config, ranks = job.config, job.machine.ranks
    batch = plan_batch(job.global_batch, ranks, micro_batch)
    setting = Setting(
        length=length or config.data.sequence_length,
        micro_batch=micro_batch,
        precision=job.precision,
        recompute=way.recompute,
        masked=True,
        accumulates=batch.gradient_accumulation_steps > 1,
        strategy=way.strategy,
        ranks=ranks,
        offload=way.offload,
        adapter=config.model.adapter.model_copy(update={"kind": way.adapter}),
        optim=way.optim,
        cuda=job.machine.gpu.cuda,
    )
    memory = peak_memory(job.shape, setting)
    return Choice(way, setting, batch, memory, job.machine.gpu.memory)


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
