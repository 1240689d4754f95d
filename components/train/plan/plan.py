"""The plan of a training: what to use, what it takes, and why; by formula, without torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.decision import Decision
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.train.plan.decisions import decisions
from steadytrain.components.train.plan.fit import Choice, Measure, choose, confirmed
from steadytrain.components.train.plan.hardware import Gpu
from steadytrain.components.train.plan.hosts import Hosts
from steadytrain.components.train.plan.learned import as_learned
from steadytrain.components.train.plan.length import Length, length_of
from steadytrain.components.train.plan.machine import Job, Machine
from steadytrain.components.train.plan.model import model_name, model_shape
from steadytrain.components.train.plan.offer import Offer, offer_of
from steadytrain.components.train.plan.problems import problems
from steadytrain.components.train.plan.remarks import remarks
from steadytrain.components.train.plan.remedies import remedies
from steadytrain.components.train.plan.scaling import Size, policy, scaling
from steadytrain.components.train.plan.states import trained_parameters
from steadytrain.components.train.plan.strategy import (
    Way,
    refuse_what_is_too_large,
    ways,
    wished_ways,
)
from steadytrain.components.train.plan.time_cost import (
    Preemptions,
    Timing,
    by_table,
    preemptions,
)


@dataclass(frozen=True)
class Plan:
    """All that `steadytrain plan` tells.

    problems: what cannot work, of what the user has set, of the memory or of what there is.
    remedies: the nearest that does, where something cannot.
    offers: of every kind of GPU that there is to choose from, as many of each as here; by formula.
    scaling: of the chosen kind on other numbers; none of a machine's own CPU.
    measured: whether the choice's memory is of a dry run.
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
    scaling: Sequence[Size]
    chosen_by: str
    measured: bool = False

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
                "host_memory": job.machine.host_memory,
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
                "by": "dry run" if self.measured else "formula",
                "moment": memory.moment,
                "parts": memory.parts,
                "total": memory.total,
                "capacity": self.choice.capacity,
                "host": memory.host,
            },
            "length": asdict(self.length),
            "offer": asdict(self.offer),
            "preemptions": asdict(self.preemptions),
            "scaling": {
                "policy": policy(job, self.scaling),
                "sizes": [asdict(size) for size in self.scaling],
            },
            "cheapest": [asdict(offer) for offer in self.cheapest],
            "fastest": [offer.gpu for offer in self.fastest],
            "do_not_fit": [offer.gpu for offer in self.offers if not offer.fits],
        }


def plan_training(
    config: RunConfig,
    gpus: Sequence[Gpu],
    gpu: Gpu | None = None,
    hosts: Hosts | None = None,
    *,
    measure: Measure | None = None,
    timed: Timing = by_table,
) -> Plan:
    """Plans a training on compute.nodes x compute.nproc_per_node GPUs.

    Args:
        gpus: the kinds to choose from, with prices.
        gpu: the kind to plan for; None: the cheapest of them that fits.
        hosts: what is known of the nodes; None: nothing.
        measure: memory of what is chosen in the end; None: the formula's stands.
        timed: how fast that is; all others go by the table.

    Raises:
        BadInput: the architecture is not known, is too large for the product, or the batch
            cannot be cut for so many ranks.
    """
    nodes, per_node = config.compute.nodes, config.compute.nproc_per_node
    hosts, machine = hosts or Hosts(), Machine(gpu or gpus[-1], nodes, per_node)
    job = Job(config, model_name(config), model_shape(config), machine, hosts)
    refuse_what_is_too_large(job)
    jobs = [job.on(each, nodes, per_node) for each in gpus]
    offers = [_by_table(each) for each in jobs]
    chosen_by = "given"
    if gpu is None:
        chosen_by = "the plan: the cheapest of the table that fits"
        if hosts.of_a_cluster:
            chosen_by = "the cluster: the cheapest of its GPUs that fits"
    kind = gpu or _cheapest(gpus, offers)
    job = job.on(kind, nodes, per_node)
    choosing = partial(_choose, candidates=_ways(job))
    choice = confirmed(job, choosing, measure) if measure else choosing(job)
    speed = timed(job, choice)
    offer = offer_of(job, choice, speed)
    return Plan(
        job=job,
        choice=choice,
        trained=trained_parameters(job.shape, choice.setting),
        decisions=decisions(job, choice, speed.tokens_per_second),
        problems=list(problems(job, choice)),
        remedies=remedies(job, choice) if not choice.fits else [],
        remarks=list(remarks(job, choice)),
        length=length_of(job.config, job.global_batch),
        offer=offer,
        preemptions=preemptions(job, choice),
        offers=[offer if each.gpu == offer.gpu else each for each in offers],
        scaling=scaling(job) if job.machine.gpu.cuda else [],
        chosen_by=chosen_by,
        measured=measure is not None,
    )


def _by_table(job: Job) -> Offer:
    choice = _choose(job, ways(job) or wished_ways(job))
    return offer_of(job, choice, by_table(job, choice))


def _choose(job: Job, candidates: Sequence[Way]) -> Choice:
    return as_learned(job, choose(job, candidates))


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


def _cheapest(gpus: Sequence[Gpu], offers: Sequence[Offer]) -> Gpu:
    """By price where it is known, else the fastest; the largest where none fits."""
    fitting = [offer for offer in offers if offer.fits]
    priced = [offer for offer in fitting if offer.usd_per_million_tokens is not None]
    if priced:
        name = min(priced, key=lambda offer: offer.usd_per_million_tokens or 0.0).gpu
    elif fitting:
        name = max(fitting, key=lambda offer: offer.tokens_per_second.middle).gpu
    else:
        name = max(gpus, key=lambda gpu: gpu.memory).name
    return next(gpu for gpu in gpus if gpu.name == name)
