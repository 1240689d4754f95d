"""How a kind of GPU would do in a training run: its speed, hours and cost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from steadytrain.components.memory.peak import CUDA_CONTEXT
from steadytrain.components.memory.techniques import answering_teacher
from steadytrain.components.shared.chunks import answer_bytes, answered_rows
from steadytrain.components.shared.config.optimizers import DEFAULT, optimizer_spec
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.shared.quantities import duration, number, size
from steadytrain.components.sizing.batch import IN_A_NODE, MOST_GPUS
from steadytrain.components.sizing.decisions import efficiency
from steadytrain.components.sizing.fit import Choice, choose, with_method, works
from steadytrain.components.sizing.length import length_of, prepared
from steadytrain.components.sizing.machine import Workload
from steadytrain.components.sizing.strategy import Adapter, options, requested_options
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
    memory = answering(job, choice)
    if memory is None:
        return
    takes = f"{size(memory.disk * 1e6)} of disk for each million targets"
    if memory.tokens is not None and memory.targets is not None:
        span = hours(by_table(job, choice).tokens_per_second, memory.tokens)
        takes = (
            f"{duration(span.low * 3600)} to {duration(span.high * 3600)} of the hours and "
            f"{size(memory.disk * memory.targets)} of disk besides the data"
        )
    yield (
        f"training.distillation.top_k = {job.config.training.distillation.top_k}: before the first "
        f"step, the teacher answers each training row once, which takes {takes}; it needs "
        f"{size(memory.memory)} of device memory then, and none afterwards"
    )


def answering_problem(job: Workload, choice: Choice) -> Iterator[str]:
    """Yield a sentence if the teacher does not fit on the device."""
    memory = answering(job, choice)
    if memory is not None and memory.memory > choice.usable:
        yield (
            f"training.distillation.teacher needs {size(memory.memory)} of device memory to answer "
            f"the training rows, and {size(choice.usable)} of {job.machine.gpu.name} are usable; "
            "use a smaller teacher or a larger GPU"
        )


@dataclass(frozen=True)
class Offer:
    """How one kind of GPU would do.

    hours, usd, spot_usd: None if the steps or the price are unknown.
    usd_per_million_tokens: the middle of the interval, used for sorting.
    timed_by: where its speed comes from.
    method: what is trained: all weights, lora or qlora.
    best_for: what the GPU is usually chosen for.
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
    method: str
    best_for: str


def offer_of(job: Workload, choice: Choice, speed: Speed) -> Offer:
    """Return the offer for the job's GPU with a choice."""
    gpu, ranks, span = job.machine.gpu, job.machine.ranks, speed.tokens_per_second
    length = length_of(job.config, job.global_batch, job.sampled)
    needed = None
    if length.tokens is not None:
        before = (scoring_of(job, choice), answering(job, choice))
        tokens = sum(item.tokens or 0.0 for item in before if item is not None)
        needed = hours(span, length.tokens + tokens)
    price, spot = gpu.usd_per_hour, gpu.spot_usd_per_hour
    if job.config.compute.price_per_hour is not None:
        # It is that of the configured machine, and the job may be on another one.
        price = job.config.compute.price_per_hour / job.config.compute.world_size
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
        method="all weights" if choice.option.adapter == "none" else choice.option.adapter,
        best_for=gpu.best_for,
    )


def no_price(prices: str, device: str) -> str:
    """Return the sentence on a device without a price."""
    return f"price: {prices} has none for {device}; set compute.price_per_hour"


def over_budget(budget: float | None, total: float | None, unknown: str) -> Iterator[str]:
    """Yield a sentence if training costs more than the budget, or may.

    Args:
        total: expected USD; None if it is not known, for the reasons in `unknown`.
    """
    if budget is None:
        return
    if total is None:
        yield f"compute.budget_usd = {budget:g}: it cannot be checked ({unknown})"
    elif total > budget:
        yield f"compute.budget_usd = {budget:g}: training is expected to cost {number(total)} USD"


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


@dataclass(frozen=True)
class Method:
    """A method of fine-tuning on the plan's hardware.

    offer: None if it does not fit, or cannot be combined with the configuration.
    trade_off: what to expect of the model, in one sentence.
    """

    name: str
    offer: Offer | None
    trade_off: str


_TRADE_OFFS: Final[Mapping[Adapter, str]] = {
    "none": "learns most, and forgets most of what the model knew; the result is a whole model",
    # Biderman et al. 2024, "LoRA Learns Less and Forgets Less".
    "lora": "learns less than all weights and forgets less, close to them on few instructions; the "
    "result is a small adapter",
    # Dettmers et al. 2023.
    "qlora": "as LoRA, with weights rounded to 4 bits, which take a quarter of the memory and "
    "time to unpack",
}


def methods(job: Workload) -> list[Method]:
    """Return all weights, LoRA and QLoRA side by side; none of a model from scratch."""
    if job.from_scratch:
        return []
    result = []
    for kind, trade_off in _TRADE_OFFS.items():
        choice = with_method(job, kind)
        offer = None if choice is None else offer_of(job, choice, by_table(job, choice))
        result.append(Method("all weights" if kind == "none" else kind, offer, trade_off))
    return result


@dataclass(frozen=True)
class Size:
    """A number of GPUs of one kind, and how they would do.

    offer: None if the job doesn't work on them.
    reason: what to do with that many GPUs, and why; or why it doesn't work.
    """

    nodes: int
    gpus_per_node: int
    offer: Offer | None
    reason: str

    def __str__(self) -> str:
        return f"{self.nodes} x {self.gpus_per_node}"


def scaling(job: Workload) -> list[Size]:
    """Return 1, 2, 4 and so on to 128 GPUs, and the requested number.

    Nodes are filled before there are more of them. Without a request for several, they have 8.
    """
    result: list[Size] = []
    for nodes, per_node in _sizes(job):
        smaller = next((size for size in reversed(result) if size.offer), None)
        result.append(_size(job.on(job.machine.gpu, nodes, per_node), smaller))
    return result


def policy(job: Workload, sizes: Sequence[Size]) -> str:
    """Return what follows for a run, in one sentence."""
    if not sizes:
        return "numbers of GPUs are compared for a GPU of the table only"
    if not any(size.offer for size in sizes):
        return "none of these sizes works"
    nodes, per_node = job.machine.nodes, job.machine.per_node
    stays = f"the global batch stays {job.global_batch}, so the result does too"
    if job.on(job.machine.gpu, 1, 1).global_batch != job.on(job.machine.gpu, 1, 2).global_batch:
        stays = (
            "the global batch grows with the ranks, and so changes what is learned; "
            "training.global_batch_size keeps it"
        )
    if nodes == 1:
        return stays
    working = [size.nodes for size in sizes if size.offer and size.gpus_per_node == per_node]
    if min(working, default=nodes) >= nodes:
        return f"it does not fit on fewer nodes, so it waits if some are lost; {stays}"
    return (
        f"if nodes stay unavailable, it can continue with {min(working)} "
        f"(recovery.min_nodes={min(working)}); {stays}"
    )


def _sizes(job: Workload) -> list[tuple[int, int]]:
    """Return nodes and GPUs of each, the fewest GPUs first."""
    nodes, per_node = job.machine.nodes, job.machine.per_node
    full = per_node if nodes > 1 else max(IN_A_NODE, per_node)
    powers = [2**power for power in range(MOST_GPUS.bit_length())]
    sizes = {(nodes, per_node), *((1, count) for count in powers if count <= full)}
    sizes |= {(count, full) for count in powers if count * full <= MOST_GPUS}
    return sorted(sizes, key=lambda size: (size[0] * size[1], size))


def _size(job: Workload, smaller: Size | None) -> Size:
    """Return how the job would do on its machine.

    Args:
        smaller: the next smaller size that works.
    """
    machine, choice = job.machine, works(job)
    if choice is None:
        return Size(machine.nodes, machine.per_node, None, _why_not(job))
    offer = offer_of(job, choice, by_table(job, choice))
    reasons = [efficiency(job, choice)[0].reason, *_gain(job, offer, smaller)]
    return Size(machine.nodes, machine.per_node, offer, "; ".join(reasons))


def _why_not(job: Workload) -> str:
    gpu, ranks, batch = job.machine.gpu, job.machine.ranks, job.global_batch
    if not job.is_available:
        return f"the cluster does not have that many {gpu.name}"
    if batch % ranks:
        return (
            f"a global batch of {batch} cannot be split over {ranks} ranks: "
            f"training.global_batch_size={-(-batch // ranks) * ranks} can, which changes what is "
            "learned (training.lr_scaling)"
        )
    try:
        least = choose(job, options(job) or requested_options(job))
    except BadInput as error:
        return str(error)
    if least.fits:
        return f"{least.option.strategy} does not support these settings"
    if not least.fits_gpu:
        needs, usable = size(least.memory.total), size(least.usable)
        return f"it needs {needs} of each {gpu.name}, and {usable} are usable"
    return f"it needs {size(least.host_needed)} of host memory on each node, which is too much"


def _gain(job: Workload, offer: Offer, smaller: Size | None) -> Iterator[str]:
    """Yield what the size gains over the next smaller one that works."""
    if smaller is None or smaller.offer is None:
        return
    if offer.method != smaller.offer.method:
        yield f"trains {offer.method}, not {smaller.offer.method} as {smaller}: not comparable"
        return
    speed = offer.tokens_per_second.middle / smaller.offer.tokens_per_second.middle
    cost = job.machine.ranks / (smaller.nodes * smaller.gpus_per_node) / speed
    network = ", as ranks wait for the network" if job.machine.nodes > smaller.nodes == 1 else ""
    yield f"{speed:.2f} times as fast as {smaller} at {cost:.2f} times the cost per token{network}"
