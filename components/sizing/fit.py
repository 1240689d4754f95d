"""Which option of training fits, and with which micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from pydantic import ValidationError

from steadytrain.components.memory.peak import Memory, peak_memory
from steadytrain.components.memory.setting import Setting
from steadytrain.components.memory.techniques import with_techniques
from steadytrain.components.shared.batch import REPLICATED
from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.sizing.batch import LARGEST_DERIVED, BatchPlan, plan_batch
from steadytrain.components.sizing.machine import Workload
from steadytrain.components.sizing.strategy import Adapter, TrainingOption, options

LARGEST_MICRO_BATCH: Final = 64
ENOUGH_TOKENS: Final = 2048
"""Tokens in a micro-batch that keep a GPU busy with matrix products: an assumption. If an option
fits fewer, the next option, which needs less memory per token, is preferred."""

SPARE: Final = 0.05
"""Share of a GPU's memory that stays free to cover the formula's mean error."""

HOST_SPARE: Final = 0.1
"""Share of a node's memory for the system and the processes themselves: an assumption."""


_TRIES: Final = 3
"""Maximum number of dry runs. Another one fails only if the formula's error is larger than the last
one measured."""


@dataclass(frozen=True)
class Choice:
    """An option, how it splits the batch, and the memory that it needs.

    memory: of a rank.
    host_needed: bytes of host memory for all ranks of a node.
    host_capacity: bytes of host memory of a node; None if unknown.
    learned: reasons by field, if an earlier run found out that the value must be smaller.
    """

    option: TrainingOption
    setting: Setting
    batch: BatchPlan
    memory: Memory
    capacity: int
    host_needed: int
    host_capacity: int | None
    learned: Mapping[str, str] = field(default_factory=dict)

    @property
    def plan(self) -> BatchPlan:
        """The batch plan that a run starts with."""
        option = self.option
        return self.batch.changed(
            gradient_checkpointing=option.recompute,
            strategy=REPLICATED if option.strategy == "single" else option.strategy,
            offload=option.offload,
        )

    @property
    def usable(self) -> int:
        """The bytes of a GPU that a plan may use."""
        return int((1 - SPARE) * self.capacity)

    @property
    def host_usable(self) -> int | None:
        """The bytes of a node's host memory that a plan may use."""
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
        """Needed divided by usable memory, for the device or the host, whichever is larger."""
        host = self.host_needed / self.host_usable if self.host_usable else 0.0
        return max(self.memory.total / self.usable, host)


Measure = Callable[[Choice], Memory]


def choose(job: Workload, candidates: Sequence[TrainingOption]) -> Choice:
    """Return the first option that fits with a good micro-batch, else the first that fits at all.

    If none fits, return the one that lacks least. Lacking host memory is better than lacking GPU
    memory.

    Args:
        candidates: at least one.

    Raises:
        BadInput: the user's batch can't be split that way, or adapters target layers that the model
            doesn't have.
    """
    best = [_best(job, option) for option in candidates]
    good = (choice for choice in best if choice.fits and _is_good(job, choice))
    fitting = (choice for choice in best if choice.fits)
    least = min(best, key=lambda choice: (not choice.fits_gpu, choice.shortage))
    return next(good, None) or next(fitting, None) or least


def confirmed(job: Workload, choosing: Callable[[Workload], Choice], measure: Measure) -> Choice:
    """Return a choice with measured memory; if that is too much, the next choice that fits.

    Args:
        choosing: chooses by the formula's memory.
        measure: measures the memory of a rank that the formula estimates.
    """
    tight, capacity = job, job.machine.gpu.memory
    for _ in range(_TRIES):
        estimated = choosing(tight)
        result = replace(estimated, memory=measure(estimated), capacity=capacity)
        if result.fits or not estimated.fits:
            break
        # Reduce the memory by the factor that the formula was wrong by.
        tight = _with_less(tight, estimated.memory.total / result.memory.total)
    return result


def _with_less(job: Workload, share: float) -> Workload:
    gpu = job.machine.gpu
    smaller = gpu.model_copy(update={"memory_gb": gpu.memory_gb * share})
    return replace(job, machine=replace(job.machine, gpu=smaller))


def fitting(job: Workload, candidates: Sequence[TrainingOption]) -> Choice | None:
    """Return the choice if there are candidates and it fits; else None.

    Raises:
        BadInput: as for `choose`.
    """
    choice = choose(job, candidates) if candidates else None
    return choice if choice and choice.fits else None


_METHODS: Final[Mapping[str, Sequence[Adapter]]] = {
    # Frozen weights need no gradients, which are a third of the work.
    "fastest": ("lora", "none", "qlora"),
    "best": ("none", "lora", "qlora"),
}
"""By goal: methods, the preferred first. Other goals prefer none."""


def for_goal(job: Workload, candidates: Sequence[TrainingOption]) -> Sequence[TrainingOption]:
    """Return the candidates with the method that suits the goal best and fits; else all."""
    for method in _METHODS.get(job.config.training.goal or "", ()):
        group = [option for option in candidates if option.adapter == method]
        if fitting(job, group):
            return group
    return candidates


def with_method(job: Workload, method: Adapter) -> Choice | None:
    """Return what fits if this method were asked for; None if nothing does."""
    content = job.config.model_dump(exclude_unset=True)
    content["model"] = content["model"] | {
        "adapter": content["model"].get("adapter", {}) | {"kind": method}
    }
    try:
        asked = replace(job, config=RunConfig.model_validate(content))
        return fitting(asked, options(asked))
    except (BadInput, ValidationError):
        return None


def works(job: Workload) -> Choice | None:
    """Return what fits, if the hosts have the machine and the batch can be split over its ranks."""
    try:
        return fitting(job, for_goal(job, options(job))) if job.is_available else None
    except BadInput:
        return None


def at(
    job: Workload, option: TrainingOption, micro_batch: int, *, length: int | None = None
) -> Choice:
    """Evaluate one option with one micro-batch."""
    config, ranks = job.config, job.machine.ranks
    batch = plan_batch(job.global_batch, ranks, micro_batch)
    setting = Setting(
        length=length or config.data.sequence_length,
        micro_batch=micro_batch,
        precision=job.precision,
        recompute=option.recompute,
        accumulates=batch.gradient_accumulation_steps > 1,
        strategy=option.strategy,
        ranks=ranks,
        offload=option.offload,
        adapter=config.model.adapter.model_copy(
            update={
                "kind": option.adapter,
                "frozen_embeddings": option.frozen_embeddings,
                "frozen_head": option.frozen_head,
            }
        ),
        optim=option.optim,
        cuda=job.machine.gpu.cuda,
    )
    setting = with_techniques(setting, config, job.shape, sequences=job.global_batch // ranks)
    memory, machine = peak_memory(job.shape, setting), job.machine
    host_needed = memory.host * machine.per_node
    return Choice(
        option, setting, batch, memory, machine.gpu.memory, host_needed, machine.host_memory
    )


def _best(job: Workload, option: TrainingOption) -> Choice:
    """Return the choice with the largest micro-batch that fits, or with the smallest one."""
    sizes = list(_micro_batches(job))
    choices = (at(job, option, size) for size in sizes)
    return next((choice for choice in choices if choice.fits), None) or at(job, option, sizes[-1])


def _micro_batches(job: Workload) -> Iterable[int]:
    """Return the sizes to try, largest first; only the user's value if it is set."""
    if job.config.training.micro_batch is not None:
        return (job.config.training.micro_batch,)
    if job.short_of_memory:
        return (1,)
    share = plan_batch(job.global_batch, job.machine.ranks, limit=1).gradient_accumulation_steps
    largest = min(share, LARGEST_MICRO_BATCH if job.machine.gpu.cuda else LARGEST_DERIVED)
    return (size for size in range(largest, 0, -1) if share % size == 0)


def _is_good(job: Workload, choice: Choice) -> bool:
    """Return whether it keeps the GPU busy.

    Waiting for the host or losing precision is only worthwhile if nothing else fits.
    """
    fields = ("model.adapter.frozen_embeddings", "model.adapter.frozen_head")
    if choice.option.lightened and not any(map(job.is_set, fields)):
        return False
    largest = max(_micro_batches(job))
    return choice.setting.tokens >= ENOUGH_TOKENS or choice.plan.micro_batch_size == largest
