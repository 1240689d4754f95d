"""How a kind of GPU would do in a training run: its speed, hours and cost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from steadytrain.components.memory.peak import CUDA_CONTEXT
from steadytrain.components.memory.techniques import answering_teacher
from steadytrain.components.shared.chunks import answer_bytes, answered_rows
from steadytrain.components.shared.config.optimizers import DEFAULT, optimizer_spec
from steadytrain.components.shared.quantities import duration, size
from steadytrain.components.sizing.fit import Choice, works
from steadytrain.components.sizing.length import length_of, prepared
from steadytrain.components.sizing.machine import Workload
from steadytrain.components.sizing.time_cost import (
    Span,
    Speed,
    by_table,
    hours,
    pass_tokens,
    preemptions,
    scoring_of,
)


@dataclass(frozen=True)
class Answering:
    """The pass.

    disk: bytes for each target. memory: of the device, while the student is not there yet.
    tokens: of training that take as long; None if the data are not prepared yet. targets: the same.
    """

    disk: int
    memory: int
    tokens: float | None
    targets: int | None


def answering(job: Workload, choice: Choice) -> Answering | None:
    """Return what the pass takes; None if no answers are stored.

    Raises:
        BadInput: the teacher's architecture is unknown.
    """
    config, setting = job.config, choice.setting
    distillation, data = config.training.distillation, prepared(job.config)
    if not distillation.stored:
        return None
    teacher = answering_teacher(config, half=setting.half, length=setting.length)
    tokens = answered_rows(setting.length) * setting.length
    side = None if data is None else data.sides["train"]
    return Answering(
        answer_bytes(distillation.top_k or 0),
        teacher.alone(tokens) + (CUDA_CONTEXT if setting.cuda else 0),
        pass_tokens(job, setting, teacher),
        None if side is None else side.target_tokens or side.rows,
    )


def answering_remark(job: Workload, choice: Choice) -> Iterator[str]:
    """Yield a sentence about the pass, if there is one."""
    found = answering(job, choice)
    if found is None:
        return
    takes = f"{size(found.disk * 1e6)} of disk for each million targets"
    if found.tokens is not None and found.targets is not None:
        span = hours(by_table(job, choice).tokens_per_second, found.tokens)
        takes = (
            f"{duration(span.low * 3600)} to {duration(span.high * 3600)} of the hours and "
            f"{size(found.disk * found.targets)} of disk beside the data"
        )
    yield (
        f"training.distillation.top_k = {job.config.training.distillation.top_k}: before the first "
        f"step, the teacher answers each training row once, which takes {takes}; it needs "
        f"{size(found.memory)} of device memory then, and none afterwards"
    )


def answering_problem(job: Workload, choice: Choice) -> Iterator[str]:
    """Yield a sentence if the teacher does not fit on the device."""
    found = answering(job, choice)
    if found is not None and found.memory > choice.usable:
        yield (
            f"training.distillation.teacher needs {size(found.memory)} of device memory to answer "
            f"the training rows, and {size(choice.usable)} of {job.machine.gpu.name} are usable; "
            "use a smaller teacher or a larger GPU"
        )


@dataclass(frozen=True)
class Offer:
    """How one kind of GPU would do.

    hours, usd, spot_usd: None if the steps or the price are unknown.
    usd_per_million_tokens: the middle of the interval, used for sorting.
    timed_by: where its speed comes from.
    """

    gpu: str
    fits: bool
    how: str
    memory_gb: float
    capacity_gb: float
    tokens_per_second: Span
    hours: Span | None
    usd: Span | None
    spot_usd: Span | None
    usd_per_million_tokens: float | None
    timed_by: str


def offer_of(job: Workload, choice: Choice, speed: Speed) -> Offer:
    """Return the offer for the job's GPU with a choice."""
    gpu, ranks, span = job.machine.gpu, job.machine.ranks, speed.tokens_per_second
    length = length_of(job.config, job.global_batch)
    needed = None
    if length.tokens is not None:
        before = (scoring_of(job, choice), answering(job, choice))
        tokens = sum(item.tokens or 0.0 for item in before if item is not None)
        needed = hours(span, length.tokens + tokens)
    price, spot = gpu.usd_per_hour, gpu.spot_usd_per_hour
    if job.config.compute.price_per_hour is not None:
        price = job.config.compute.price_per_hour / ranks
    factor = preemptions(job, choice).factor
    return Offer(
        gpu=gpu.name,
        fits=choice.fits
        and job.is_available
        and choice.option.is_possible(job)
        and job.has_precision,
        how=_how(choice),
        memory_gb=round(choice.memory.total / 1e9, 2),
        capacity_gb=gpu.memory_gb,
        tokens_per_second=span,
        hours=needed,
        usd=_cost(needed, price, ranks),
        spot_usd=_cost(needed.times(factor) if needed else None, spot, ranks),
        usd_per_million_tokens=(
            None if price is None else price * ranks * 1e6 / span.middle / 3600
        ),
        timed_by=speed.source,
    )


def _cost(needed: Span | None, price: float | None, ranks: int) -> Span | None:
    return None if needed is None or price is None else needed.times(price * ranks)


def _how(choice: Choice) -> str:
    option, batch = choice.option, choice.batch
    parts: list[str] = [option.adapter] if option.adapter != "none" else []
    parts += ["host embeddings"] if option.frozen_embeddings == "host" else []
    parts += [f"{option.frozen_head} head"] if option.frozen_head != "as_loaded" else []
    parts.append(option.strategy)
    parts += ["recompute"] if option.recompute else []
    parts += [f"offload {option.offload}"] if option.offload != "none" else []
    if option.optim != DEFAULT:
        parts.append(optimizer_spec(option.optim).title or option.optim)
    return f"{' + '.join(parts)}, {batch.micro_batch_size} x {batch.gradient_accumulation_steps}"


_MOST_IN_A_NODE: Final = 8


@dataclass(frozen=True)
class Size:
    """A number of GPUs of one kind, and how they would do; None if the job doesn't work on them."""

    nodes: int
    gpus_per_node: int
    offer: Offer | None


def scaling(job: Workload) -> list[Size]:
    """Return the sizes to compare: one node with up to 8 GPUs, or up to twice the nodes."""
    return [_size(job, nodes, per_node) for nodes, per_node in _sizes(job)]


def policy(job: Workload, sizes: Sequence[Size]) -> str:
    """Return what follows for a run, in one sentence."""
    if not any(size.offer for size in sizes):
        return "none of these sizes works"
    stays = f"the global batch stays {job.global_batch}, so the result does too"
    nodes = job.machine.nodes
    if nodes == 1:
        return stays
    fewest = min(size.nodes for size in sizes if size.offer)
    if fewest >= nodes:
        return f"it does not fit on fewer nodes, so it waits if some are lost; {stays}"
    return (
        f"if nodes stay unavailable, it can continue with {fewest} "
        f"(recovery.min_nodes={fewest}); {stays}"
    )


def _sizes(job: Workload) -> Iterator[tuple[int, int]]:
    nodes, per_node = job.machine.nodes, job.machine.per_node
    if nodes == 1:
        yield from ((1, count) for count in _doubled(per_node, _MOST_IN_A_NODE))
    else:
        yield from ((count, per_node) for count in _doubled(nodes, 2 * nodes))


def _doubled(asked: int, most: int) -> list[int]:
    """Return 1, 2, 4 and so on, and the requested number."""
    counts = {asked, *(2**power for power in range(most.bit_length()))}
    return sorted(count for count in counts if count <= max(most, asked))


def _size(job: Workload, nodes: int, per_node: int) -> Size:
    there = job.on(job.machine.gpu, nodes, per_node)
    choice = works(there)
    offer = offer_of(there, choice, by_table(there, choice)) if choice else None
    return Size(nodes, per_node, offer)
