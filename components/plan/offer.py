"""How a kind of GPU would do in a training run: its speed, hours and cost."""

from __future__ import annotations

from dataclasses import dataclass

from steadytrain.components.plan.answers import answering
from steadytrain.components.shared.config.optimizers import DEFAULT, optimizer_spec
from steadytrain.components.sizing.fit import Choice
from steadytrain.components.sizing.length import length_of
from steadytrain.components.sizing.machine import Workload
from steadytrain.components.sizing.scoring import scoring_of
from steadytrain.components.sizing.time_cost import Span, Speed, hours, preemptions


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
