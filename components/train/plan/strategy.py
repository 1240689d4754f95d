"""Ways to train a model, the one to prefer first: strategy by size, then what needs less memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Final, Literal

from steadytrain.components.shared.config.compute import OFFLOADING, SHARDING, Offload, Strategy
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.train.plan.hardware import find_gpu
from steadytrain.components.train.plan.machine import Job

BILLION: Final = 10**9
LARGEST: Final = 100 * BILLION
"""Parameters, beyond which no strategy of the product suffices."""

Adapter = Literal["none", "lora", "qlora"]
Optimizer = Literal["adamw_torch", "adamw_bnb_8bit", "paged_adamw_8bit"]
_OFFLOADS: Final[tuple[Offload, ...]] = ("none", "optimizer", "all")


@dataclass(frozen=True)
class Way:
    """How a model is trained, as far as it may be chosen."""

    adapter: Adapter
    strategy: Strategy
    recompute: bool
    optim: Optimizer
    offload: Offload = "none"

    def is_possible(self, job: Job) -> bool:
        """Whether the product can do that (`RunConfig.unsharded`)."""
        if self.offload != "none" and self.strategy not in OFFLOADING[self.offload]:
            return False
        plain = self.optim == "adamw_torch" and self.adapter != "qlora"
        if not (plain or job.machine.gpu.cuda):
            return False
        whole = plain and not job.unsharded
        return whole or self.strategy not in SHARDING


def refuse_what_is_too_large(job: Job) -> None:
    """A model whose layers would have to be cut.

    Raises:
        BadInput: with what it would take.
    """
    count = job.shape.parameters
    if count <= LARGEST:
        return
    largest = find_gpu("h100")
    cards = -(-16 * count // largest.memory)
    raise BadInput(
        f"{job.name} has {count / BILLION:.1f} billion parameters: above 100 billion this product "
        "trains none, with adapters neither",
        remedy="it takes tensor and pipeline parallelism, as in Megatron-LM, fast connections "
        f"within and between nodes, and for weights, gradients and AdamW's state alone "
        f"{16 * count / 1e12:.1f} TB: {cards} GPUs of {largest.memory_gb:g} GB. The nearest here "
        "is a model of 70 billion, such as hub:meta-llama/Llama-3.1-70B",
    )


def ways(job: Job) -> list[Way]:
    """Those that leave what the user has set as it is, the one to prefer first."""
    return [way for way in wished_ways(job) if way.is_possible(job)]


def wished_ways(job: Job) -> list[Way]:
    """The same, whether the product can do that or not."""
    return _unique(_as_set(job, way) for way in _all(job))


def offloading_ways(job: Job) -> list[Way]:
    """With the host's memory, which is slower."""
    whole = job.from_scratch or (
        job.given("model.adapter.kind") and job.config.model.adapter.kind == "none"
    )
    kinds: tuple[Adapter, ...] = ("none",) if whole else ("lora", "none")
    strategy: Strategy = "fsdp" if job.shape.parameters < 10 * BILLION else "zero3"
    found = [Way("none", "zero2", True, "adamw_torch", "optimizer")] if whole else []
    found += [Way(kind, strategy, True, "adamw_torch", "all") for kind in kinds]
    return [way for way in found if way.is_possible(job)]


def free_ways(job: Job) -> list[Way]:
    """As if the user had set none of it."""
    return _unique(way for way in _all(job) if way.is_possible(job))


def _all(job: Job) -> Iterator[Way]:
    kind = job.config.model.adapter.kind
    if job.given("model.adapter.kind") or job.from_scratch:
        yield from _full(job) if kind == "none" else _adapted(job, kind)
        return
    yield from _full(job)
    yield from _adapted(job, "lora")
    yield from _adapted(job, "qlora")


def _full(job: Job) -> Iterator[Way]:
    count, alone = job.shape.parameters, job.machine.ranks == 1
    plain: Optimizer = "paged_adamw_8bit" if job.short_of_memory else "adamw_torch"
    if alone:
        yield from _both("none", "single", plain, job)
        yield Way("none", "single", True, "adamw_bnb_8bit")
    elif count < BILLION:
        yield from _both("none", "ddp", plain, job)
        yield Way("none", "fsdp", True, "adamw_torch")
    elif count < 10 * BILLION:
        yield from _both("none", "fsdp", "adamw_torch", job)
    else:
        yield from (Way("none", "zero3", True, "adamw_torch", kind) for kind in _OFFLOADS)
    if not alone:
        # For what knows no shards.
        yield Way("none", "ddp", True, plain)


def _adapted(job: Job, kind: Adapter) -> Iterator[Way]:
    plain: Optimizer = "paged_adamw_8bit" if job.short_of_memory else "adamw_torch"
    alone = job.machine.ranks == 1
    yield from _both(kind, "single" if alone else "ddp", plain, job)
    if not alone and kind == "lora":
        sharded: Strategy = "fsdp" if job.shape.parameters < 10 * BILLION else "zero3"
        yield Way(kind, sharded, True, "adamw_torch")


def _both(adapter: Adapter, strategy: Strategy, optim: Optimizer, job: Job) -> Iterator[Way]:
    """With activations kept, and recomputed; on a small card recomputed only."""
    if not job.short_of_memory:
        yield Way(adapter, strategy, False, optim)
    yield Way(adapter, strategy, True, optim)


def _as_set(job: Job, way: Way) -> Way:
    training, compute = job.config.training, job.config.compute
    if job.given("compute.strategy"):
        way = replace(way, strategy=compute.strategy)
    if job.given("compute.offload"):
        way = replace(way, offload=compute.offload)
    if job.given("training.gradient_checkpointing"):
        way = replace(way, recompute=training.gradient_checkpointing)
    if job.given("training.optim"):
        way = replace(way, optim=training.optim)
    elif way.strategy in SHARDING:
        # The 8-bit ones know no shards.
        way = replace(way, optim="adamw_torch")
    return way


def _unique(found: Iterable[Way]) -> list[Way]:
    return list(dict.fromkeys(found))
