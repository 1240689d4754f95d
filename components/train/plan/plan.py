"""The plan of a training: what to use, what it takes, and why; by formula, without torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.train.plan.decisions import Decision, decisions
from steadytrain.components.train.plan.fit import Choice, choose
from steadytrain.components.train.plan.hardware import Gpu
from steadytrain.components.train.plan.length import Length, length_of
from steadytrain.components.train.plan.machine import Job, Machine
from steadytrain.components.train.plan.model import model_name, model_shape
from steadytrain.components.train.plan.offer import Offer, offer_of
from steadytrain.components.train.plan.recipe import recipe, remarks
from steadytrain.components.train.plan.remedies import remedies
from steadytrain.components.train.plan.states import trained_parameters
from steadytrain.components.train.plan.strategy import (
    Way,
    refuse_what_is_too_large,
    ways,
    wished_ways,
)
from steadytrain.components.train.plan.time_cost import (
    Preemptions,
    Speed,
    by_table,
    preemptions,
)


@dataclass(frozen=True)
class Plan:
    """All that `steadytrain plan` tells.

    problems: what cannot work, of what the user has set or of the memory.
    remedies: the nearest that does, where something cannot.
    offers: of every GPU of the table, as many of each as here.
    """

    job: Job
    choice: Choice
    trained: int
    decisions: Sequence[Decision]
    problems: Sequence[str]
    remedies: Sequence[str]
    remarks: Sequence[str]
    length: Length
    offer: Offer
    preemptions: Preemptions
    offers: Sequence[Offer]
    chosen_by: str

    @property
    def works(self) -> bool:
        return not self.problems

    @property
    def cheapest(self) -> list[Offer]:
        """GPUs that fit, those of unknown price at the end."""
        return sorted(
            (offer for offer in self.offers if offer.fits),
            key=lambda offer: (
                offer.usd_per_million_tokens is None,
                offer.usd_per_million_tokens or 0.0,
                offer.capacity_gb,
            ),
        )

    @property
    def fastest(self) -> list[Offer]:
        """GPUs that fit."""
        return sorted(
            (offer for offer in self.offers if offer.fits),
            key=lambda offer: (-offer.tokens_per_second.middle, offer.capacity_gb),
        )

    def as_data(self) -> dict[str, Any]:
        """For programs; bytes, seconds and USD as numbers."""
        job, memory = self.job, self.choice.memory
        return {
            "model": {
                "name": job.name,
                "family": job.shape.family,
                "parameters": job.shape.parameters,
                "trained_parameters": self.trained,
            },
            "hardware": {
                "gpu": job.machine.gpu.name,
                "nodes": job.machine.nodes,
                "gpus_per_node": job.machine.per_node,
                "chosen_by": self.chosen_by,
            },
            "works": self.works,
            "problems": list(self.problems),
            "remedies": list(self.remedies),
            "remarks": list(self.remarks),
            "decisions": [asdict(decision) for decision in self.decisions],
            "batch": {
                "micro_batch_size": self.choice.batch.micro_batch_size,
                "gradient_accumulation_steps": self.choice.batch.gradient_accumulation_steps,
                "world_size": self.choice.batch.world_size,
            },
            "memory": {
                "moment": memory.moment,
                "parts": memory.parts,
                "total": memory.total,
                "capacity": self.choice.capacity,
                "host": memory.host,
            },
            "length": asdict(self.length),
            "offer": asdict(self.offer),
            "preemptions": asdict(self.preemptions),
            "cheapest": [asdict(offer) for offer in self.cheapest],
            "fastest": [offer.gpu for offer in self.fastest],
            "do_not_fit": [offer.gpu for offer in self.offers if not offer.fits],
        }


def plan_training(
    config: RunConfig,
    gpus: Sequence[Gpu],
    gpu: Gpu | None = None,
    *,
    timed: Callable[[Job, Choice], Speed] = by_table,
) -> Plan:
    """Plans a training on compute.nodes x compute.nproc_per_node GPUs.

    Args:
        gpus: the table, with prices.
        gpu: the kind to plan for; None: the cheapest of the table that fits.
        timed: how fast that one is; all others go by the table.

    Raises:
        BadInput: the architecture is not known, is too large for the product, or the batch
            cannot be cut for so many ranks.
    """
    compute = config.compute
    job = Job(
        config,
        model_name(config),
        model_shape(config),
        Machine(gpu or gpus[-1], compute.nodes, compute.nproc_per_node),
    )
    refuse_what_is_too_large(job)
    jobs = [replace(job, machine=replace(job.machine, gpu=each)) for each in gpus]
    offers = [_by_table(each) for each in jobs]
    chosen_by = "given"
    if gpu is None:
        chosen_by = "the plan: the cheapest of the table that fits"
        job = _cheapest(job, gpus, offers)
    return _finish(job, offers, chosen_by, timed)


def _by_table(job: Job) -> Offer:
    choice = choose(job, ways(job) or wished_ways(job))
    return offer_of(job, choice, by_table(job, choice))


def _finish(
    job: Job, offers: Sequence[Offer], chosen_by: str, timed: Callable[[Job, Choice], Speed]
) -> Plan:
    choice = choose(job, _ways(job))
    speed = timed(job, choice)
    offer = offer_of(job, choice, speed)
    length = length_of(job.config, job.global_batch)
    problems = _problems(job, choice)
    return Plan(
        job=job,
        choice=choice,
        trained=trained_parameters(job.shape, choice.setting),
        decisions=[*decisions(job, choice), *recipe(job, choice, length, speed.tokens_per_second)],
        problems=problems,
        remedies=remedies(job, choice) if not choice.fits else [],
        remarks=list(remarks(job, choice)),
        length=length,
        offer=offer,
        preemptions=preemptions(job, choice),
        offers=[offer if each.gpu == offer.gpu else each for each in offers],
        chosen_by=chosen_by,
    )


def _ways(job: Job) -> list[Way]:
    found, strategy = ways(job), job.config.compute.strategy
    if not found and job.unsharded:
        raise BadInput(
            f"compute.strategy = {strategy!r}: {job.machine.gpu.name} has no bfloat16, and "
            "float16 knows no shards",
            remedy="take ddp, or another GPU",
        )
    if not found:
        raise BadInput(
            f"compute.strategy = {strategy!r} cannot be combined with "
            f"compute.offload = {job.config.compute.offload!r}",
            remedy="leave one of the two out",
        )
    return found


def _cheapest(job: Job, gpus: Sequence[Gpu], offers: Sequence[Offer]) -> Job:
    """By price where it is known, else the fastest; the largest where none fits."""
    fitting = [offer for offer in offers if offer.fits]
    priced = [offer for offer in fitting if offer.usd_per_million_tokens is not None]
    if priced:
        name = min(priced, key=lambda offer: offer.usd_per_million_tokens or 0.0).gpu
    elif fitting:
        name = max(fitting, key=lambda offer: offer.tokens_per_second.middle).gpu
    else:
        name = max(gpus, key=lambda gpu: gpu.memory).name
    gpu = next(gpu for gpu in gpus if gpu.name == name)
    return replace(job, machine=replace(job.machine, gpu=gpu))


def _problems(job: Job, choice: Choice) -> list[str]:
    gpu, found = job.machine.gpu, list[str]()
    if job.precision == "bf16" and not gpu.bf16:
        found.append(
            f"training.bf16 = true: {gpu.name} has no bfloat16; training.fp16=true is the nearest"
        )
    if not choice.fits:
        found.append(_too_much(job, choice))
    if choice.setting.length > job.shape.positions:
        found.append(
            f"data.sequence_length = {choice.setting.length}: the model takes at most "
            f"{job.shape.positions} tokens; data.sequence_length={job.shape.positions} is the "
            "nearest"
        )
    return found


def _too_much(job: Job, choice: Choice) -> str:
    memory, gpu = choice.memory, job.machine.gpu
    parts = sorted(memory.parts.items(), key=lambda part: -part[1])[:3]
    largest = ", ".join(f"{name} {size / 1e9:.1f}" for name, size in parts)
    outside = 2 * (job.shape.embeddings + job.shape.head) / 1e9
    kept = (
        f"; embeddings and head stay in 16 bits, {outside:.1f} GB of the weights"
        if choice.way.adapter == "qlora"
        else ""
    )
    return (
        f"a rank needs {memory.total / 1e9:.1f} GB at its peak ({largest}{kept}), and of "
        f"{gpu.name}'s {gpu.memory_gb:g} GB {choice.usable / 1e9:.1f} can be counted on"
    )
