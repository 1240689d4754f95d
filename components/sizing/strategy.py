"""Options for training a model, best first: strategy by size, then what needs less memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Final, Literal

from steadytrain.components.memory.states import FrozenEmbeddings, FrozenHead, lighter
from steadytrain.components.shared.config.optimizers import DEFAULT, optimizer_spec
from steadytrain.components.shared.config.strategies import (
    Offload,
    strategy_features,
    strategy_spec,
)
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.sizing.hardware import find_gpu
from steadytrain.components.sizing.machine import Workload

BILLION: Final = 10**9
LARGEST: Final = 100 * BILLION
"""Number of parameters above which none of the supported strategies suffices."""

Adapter = Literal["none", "lora", "qlora"]
_OFFLOADS: Final[tuple[Offload, ...]] = ("none", "optimizer", "all")


@dataclass(frozen=True)
class TrainingOption:
    """An option: how a model is trained, as far as there is a choice."""

    adapter: Adapter
    strategy: str
    recompute: bool
    optim: str
    offload: Offload = "none"
    frozen_embeddings: FrozenEmbeddings = "device"
    frozen_head: FrozenHead = "as_loaded"

    @property
    def lightened(self) -> bool:
        """Whether frozen weights outside the layers use less device memory with adapters."""
        return self.frozen_embeddings == "host" or self.frozen_head != "as_loaded"

    def is_possible(self, job: Workload) -> bool:
        """Return whether steadytrain supports this option."""
        strategy = strategy_spec(self.strategy)
        if self.offload not in ("none", *strategy.offloads):
            return False
        if self.adapter != "none" and job.config.conflict_with("adapters"):
            return False
        on_cpu = not job.machine.gpu.cuda or self.offload != "none"
        used = {*strategy_features(self.strategy), job.precision, "cpu" if on_cpu else "cuda"}
        if used & optimizer_spec(self.optim).unsupported.keys():
            return False
        settings = {
            f"model.adapter.kind {self.adapter}",
            f"model.adapter.frozen_embeddings {self.frozen_embeddings}",
            f"model.adapter.frozen_head {self.frozen_head}",
        }
        return not (settings & strategy.unsupported.keys() or job.not_supported_by(self.strategy))


def check_fits(job: Workload) -> None:
    """Reject a model whose layers would have to be split.

    Raises:
        BadInput: with what the model would need.
    """
    count = job.shape.parameters
    if count <= LARGEST:
        return
    largest = find_gpu("h100")
    cards = -(-16 * count // largest.memory)
    raise BadInput(
        f"{job.name} has {count / BILLION:.1f} billion parameters: steadytrain trains no models "
        "above 100 billion, not even with adapters",
        remedy="that needs tensor and pipeline parallelism, as in Megatron-LM, fast "
        "connections within and between nodes, and for weights, gradients and AdamW's "
        f"state alone {16 * count / 1e12:.1f} TB: {cards} GPUs of {largest.memory_gb:g} "
        "GB. The nearest here is a model of 70 billion, such as "
        "hub:meta-llama/Llama-3.1-70B",
    )


def options(job: Workload) -> list[TrainingOption]:
    """Return the supported options that keep the user's settings, best first."""
    return [option for option in requested_options(job) if option.is_possible(job)]


def requested_options(job: Workload) -> list[TrainingOption]:
    """Return the options that keep the user's settings, including unsupported ones."""
    return _unique(_as_set(job, option) for option in _all(job))


def offloading_options(job: Workload) -> list[TrainingOption]:
    """Return the options that use host memory, which is slower."""
    whole = job.from_scratch or (
        job.is_set("model.adapter.kind") and job.config.model.adapter.kind == "none"
    )
    kinds: tuple[Adapter, ...] = ("none",) if whole else ("lora", "none")
    strategy, native = _sharding(job)[-1], job.config.compute.prefer == "native"
    result: list[TrainingOption] = []
    if whole and not native:
        result.append(TrainingOption("none", "zero2", True, DEFAULT, "optimizer"))
    result += [TrainingOption(kind, strategy, True, DEFAULT, "all") for kind in kinds]
    return [option for option in result if option.is_possible(job)]


def unconstrained_options(job: Workload) -> list[TrainingOption]:
    """Return the supported options as if the user had set none of these fields."""
    return _unique(option for option in _all(job) if option.is_possible(job))


def _all(job: Workload) -> Iterator[TrainingOption]:
    kind = job.config.model.adapter.kind
    if job.is_set("model.adapter.kind") or job.from_scratch:
        yield from _full(job) if kind == "none" else _adapted(job, kind, kind)
        return
    yield from _full(job)
    yield from _adapted(job, "lora", "qlora")
    yield from _adapted(job, "qlora", "qlora")


def _sharding(job: Workload) -> tuple[str, ...]:
    """Return the strategies that shard a model of this size, the fastest first."""
    small, prefer = job.shape.parameters < 10 * BILLION, job.config.compute.prefer
    if prefer == "deepspeed" and small:
        return ("zero2", "zero3")
    return ("fsdp",) if prefer == "native" or (small and prefer is None) else ("zero3",)


def _full(job: Workload) -> Iterator[TrainingOption]:
    count, alone = job.shape.parameters, job.machine.ranks == 1
    plain = "paged_adamw_8bit" if job.short_of_memory else DEFAULT
    if alone:
        yield from _both("none", "single", plain, job)
        yield TrainingOption("none", "single", True, "adamw_bnb_8bit")
    elif count < BILLION:
        yield from _both("none", "ddp", plain, job)
        yield from (TrainingOption("none", one, True, DEFAULT) for one in _sharding(job))
    elif count < 10 * BILLION:
        for strategy in _sharding(job):
            yield from _both("none", strategy, DEFAULT, job)
    else:
        (strategy,) = _sharding(job)
        yield from (TrainingOption("none", strategy, True, DEFAULT, kind) for kind in _OFFLOADS)
    if not alone:
        # For setups that can't be sharded.
        yield TrainingOption("none", "ddp", True, plain)


def _adapted(job: Workload, kind: Adapter, last: Adapter) -> Iterator[TrainingOption]:
    """Yield the options with one kind of adapter.

    Args:
        last: the last kind to try; after it, only weights outside the layers can be made smaller.
    """
    plain = "paged_adamw_8bit" if job.short_of_memory else DEFAULT
    alone = job.machine.ranks == 1
    replicated = "single" if alone else "ddp"
    yield from _both(kind, replicated, plain, job)
    if not alone and kind == "lora":
        yield from (TrainingOption(kind, one, True, DEFAULT) for one in _sharding(job))
    if kind == last and job.machine.gpu.cuda:
        plainest = TrainingOption(kind, replicated, True, plain)
        for embeddings, head in lighter(job.shape):
            yield replace(plainest, frozen_embeddings=embeddings, frozen_head=head)


def _both(adapter: Adapter, strategy: str, optim: str, job: Workload) -> Iterator[TrainingOption]:
    """Yield the option with and without kept activations; on a small card only without."""
    if not job.short_of_memory:
        yield TrainingOption(adapter, strategy, False, optim)
    yield TrainingOption(adapter, strategy, True, optim)


def _as_set(job: Workload, option: TrainingOption) -> TrainingOption:
    training, compute = job.config.training, job.config.compute
    if job.is_set("compute.strategy"):
        option = replace(option, strategy=compute.strategy)
    if job.is_set("compute.offload"):
        option = replace(option, offload=compute.offload)
    if job.is_set("training.gradient_checkpointing"):
        option = replace(option, recompute=training.gradient_checkpointing)
    if job.is_set("training.optim"):
        option = replace(option, optim=training.optim)
    elif strategy_spec(option.strategy).shards:
        # The 8-bit optimizers can't be sharded.
        option = replace(option, optim=DEFAULT)
    adapter = job.config.model.adapter
    if job.is_set("model.adapter.frozen_embeddings"):
        option = replace(option, frozen_embeddings=adapter.frozen_embeddings)
    if job.is_set("model.adapter.frozen_head"):
        option = replace(option, frozen_head=adapter.frozen_head)
    return option


def _unique(found: Iterable[TrainingOption]) -> list[TrainingOption]:
    return list(dict.fromkeys(found))
