"""The plan of a training run: what to use, what it needs, and why.

Based on formulas, without torch, if the architecture has one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from steadytrain.components.memory.model import any_model_shape, model_groups, model_name
from steadytrain.components.memory.states import trained_parameters
from steadytrain.components.plan.offer import (
    Method,
    Offer,
    Size,
    methods,
    no_price,
    offer_of,
    over_budget,
    policy,
    scaling,
)
from steadytrain.components.plan.problems import problems, remarks, remedies
from steadytrain.components.plan.sample import sample
from steadytrain.components.plan.stored import Stored
from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.config.data_sections import IMAGES, MULTIMODAL
from steadytrain.components.shared.config.fields import Decision
from steadytrain.components.shared.config.optimizers import DEFAULT, optimizer_spec
from steadytrain.components.shared.config.strategies import AUTO
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.sizing.decisions import decisions
from steadytrain.components.sizing.fit import Choice, Measure, choose, confirmed, for_goal
from steadytrain.components.sizing.hardware import OWN_PRICES, Gpu
from steadytrain.components.sizing.learned import as_learned
from steadytrain.components.sizing.length import Length, length_of, prepared
from steadytrain.components.sizing.machine import Hosts, Machine, Workload
from steadytrain.components.sizing.strategy import (
    TrainingOption,
    check_fits,
    options,
    requested_options,
)
from steadytrain.components.sizing.time_cost import (
    Preemptions,
    Timing,
    by_table,
    preemptions,
)
from steadytrain.components.train.fallbacks import Lengths, expected_fallbacks

if TYPE_CHECKING:
    from steadytrain.components.memory.groups import Group


@dataclass(frozen=True)
class Plan:
    """Everything that `steadytrain plan` reports.

    problems: what can't work about the user's settings, the memory, or the available hardware.
    remedies: the nearest that works, if something does not fit.
    offers: one per available kind of GPU, with the same number of each; by formula.
    groups: how parameters are trained, if not all alike.
    compared: methods of fine-tuning on this hardware.
    scaling: other numbers of the chosen kind; empty for a machine's own CPU.
    measured: whether the choice's memory comes from a dry run.
    prices: where they are from.
    unknown: why hours or the price are not known.
    """

    job: Workload
    choice: Choice
    trained: int
    decisions: Sequence[Decision]
    problems: Sequence[str]
    remedies: Sequence[str]
    remarks: Sequence[str]
    groups: Sequence[Group]
    length: Length
    offer: Offer
    preemptions: Preemptions
    offers: Sequence[Offer]
    scaling: Sequence[Size]
    compared: Sequence[Method]
    chosen_by: str
    measured: bool = False
    prices: str = OWN_PRICES
    unknown: Sequence[str] = ()

    @property
    def works(self) -> bool:
        return not self.problems

    @property
    def has_accelerate(self) -> bool:
        """Whether `accelerate launch` starts the ranks: of several on CPUs, it starts one."""
        machine, known = self.job.machine, self.choice.setting.sharing.accelerate
        return bool(known) and (machine.gpu.cuda or machine.ranks == 1)

    @property
    def stored(self) -> Stored:
        """What a checkpoint and the model take on disk."""
        adapter = self.choice.setting.adapter
        alone = adapter.freezes and not adapter.merge
        return Stored.of_weights(self.trained, self.trained if alone else self.job.shape.parameters)

    @property
    def fallbacks(self) -> list[str]:
        """What a run tries when memory runs out, in order."""
        config = self.job.config
        return expected_fallbacks(
            self.choice.plan,
            "cpu" if not self.job.machine.gpu.cuda else self.job.machine.gpu.name,
            conflict_with=config.conflict_with,
            prefer=config.compute.prefer,
            lengths=Lengths.of(self.choice.setting.length, config.recovery.min_sequence_length),
        )

    @property
    def cheapest(self) -> list[Offer]:
        """The GPUs that fit and have a price, cheapest first."""
        return sorted(
            (
                offer
                for offer in self.offers
                if offer.fits and offer.usd_per_million_tokens is not None
            ),
            key=lambda offer: (offer.usd_per_million_tokens or 0.0, offer.capacity_gb),
        )

    @property
    def without_price(self) -> list[Offer]:
        """The GPUs that fit and have no price, the smallest first."""
        fitting = (offer for offer in self.offers if offer.fits)
        return [offer for offer in fitting if offer.usd_per_million_tokens is None]

    @property
    def methods(self) -> list[str]:
        """What the GPUs with a price would train; several are not comparable."""
        return sorted({offer.method for offer in self.cheapest})

    @property
    def fastest(self) -> list[Offer]:
        """The GPUs that fit, fastest first."""
        return sorted(
            (offer for offer in self.offers if offer.fits),
            key=lambda offer: (-offer.tokens_per_second.middle, offer.capacity_gb),
        )

    def as_data(self) -> dict[str, Any]:
        """Return the plan for programs, with bytes, seconds and USD as numbers."""
        job, memory = self.job, self.choice.memory
        return {
            "model": {
                "name": job.name,
                "family": job.shape.family,
                "parameters": job.shape.parameters,
                "by": "trace" if job.shape.traced else "formula",
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
            "groups": [asdict(group) for group in self.groups],
            "decisions": [asdict(decision) for decision in self.decisions],
            "fallbacks": self.fallbacks,
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
                "disk": memory.disk,
            },
            "length": asdict(self.length),
            "offer": asdict(self.offer),
            "preemptions": asdict(self.preemptions),
            "scaling": {
                "policy": policy(job, self.scaling),
                "sizes": [asdict(size) for size in self.scaling],
            },
            "cheapest": [asdict(offer) for offer in self.cheapest],
            "methods": self.methods,
            "compared_methods": [asdict(method) for method in self.compared],
            "without_price": [asdict(offer) for offer in self.without_price],
            "prices": self.prices,
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
    prices: str = OWN_PRICES,
    data_bytes: int | None = None,
) -> Plan:
    """Plan a training run on compute.nodes x compute.nproc_per_node GPUs.

    Args:
        gpus: the kinds to choose from, with prices.
        gpu: the kind to plan for; None means the cheapest one that fits.
        hosts: what is known about the nodes; None means nothing.
        measure: measures the memory of the final choice; None keeps the formula's value.
        timed: returns the speed of the final choice; all other choices use the table.
        prices: where those of `gpus` are from.
        data_bytes: of all data, if the files here are a sample of them.

    Raises:
        BadInput: PyTorch does not train the model, its architecture is unknown, it is too large for
            steadytrain, or the batch can't be split over that many ranks.
    """
    if config.model.framework != "pytorch":
        raise BadInput(
            f"model.framework = {config.model.framework!r}: plans are for PyTorch models",
            remedy="see what a run would do with `steadytrain run FILE --dry-run`",
        )
    if config.data.task in (*IMAGES, *MULTIMODAL):
        raise BadInput(
            f"data.task = {config.data.task!r}: this plan is for models of texts",
            remedy="see what a run needs with `steadytrain plan FILE`",
        )
    nodes, per_node = config.compute.nodes, config.compute.nproc_per_node
    gpus = _for_ranks(gpus, gpu, nodes * per_node)
    hosts, machine = hosts or Hosts(), Machine(gpu or gpus[-1], nodes, per_node)
    counted = data_bytes is None and prepared(config) is not None
    sampled = None if counted else sample(config, data_bytes)
    job = Workload(config, model_name(config), any_model_shape(config), machine, hosts, sampled)
    check_fits(job)
    jobs = [job.on(each, nodes, per_node) for each in gpus]
    offers = [_by_table(each) for each in jobs]
    chosen_by = "given"
    budget, goal = config.compute.budget_usd, config.training.goal
    affordable = [offer for offer in offers if _costs_at_most(offer, budget)]
    if gpu is not None:
        kind = gpu
    elif goal is not None and (suited := _suited(goal, affordable or offers)) is not None:
        within = f", within {budget:g} USD" if affordable else ""
        chosen_by = f"the plan: training.goal = {goal}{within}"
        kind = next(each for each in gpus if each.name == suited.gpu)
    elif affordable:
        chosen_by = f"the plan: the fastest GPU that fits, within {budget:g} USD"
        quickest = max(affordable, key=lambda offer: offer.tokens_per_second.middle)
        kind = next(each for each in gpus if each.name == quickest.gpu)
    else:
        kind, how = _cheapest(gpus, offers)
        chosen_by = f"the cluster: its {how}" if hosts.of_a_cluster else f"the plan: the {how}"
    job = job.on(kind, nodes, per_node)
    choosing = partial(_choose, candidates=_options(job))
    choice = confirmed(job, choosing, measure) if measure else choosing(job)
    speed = timed(job, choice)
    offer = offer_of(job, choice, speed)
    length = length_of(job.config, job.global_batch, job.sampled)
    prices = prices if config.compute.price_per_hour is None else "compute.price_per_hour"
    reasons = [] if offer.hours else [f"hours: {length.source}"]
    if offer.usd_per_million_tokens is None:
        reasons.append(no_price(prices, kind.name))
    total = offer.usd.middle if offer.usd else None
    return Plan(
        job=job,
        choice=choice,
        trained=trained_parameters(job.shape, choice.setting),
        decisions=decisions(job, choice, speed.tokens_per_second),
        problems=[*problems(job, choice), *over_budget(budget, total, "; ".join(reasons))],
        remedies=remedies(job, choice)
        if not choice.fits
        else list(_cheaper(offer, affordable, budget)),
        remarks=list(remarks(job, choice)),
        groups=model_groups(job.config),
        length=length,
        offer=offer,
        preemptions=preemptions(job, choice),
        offers=[offer if each.gpu == offer.gpu else each for each in offers],
        compared=methods(job),
        scaling=scaling(job) if kind.cuda and not kind.profile else [],
        chosen_by=chosen_by,
        measured=measure is not None,
        prices=prices,
        unknown=reasons,
    )


_BEST: Final = ("all weights", "lora", "qlora")


def _suited(goal: str, offers: Sequence[Offer]) -> Offer | None:
    """Return the offer that suits a goal, or None if none fits; without prices the fastest."""
    fitting = [offer for offer in offers if offer.fits]
    if goal == "best" and fitting:
        best = min(fitting, key=lambda offer: _BEST.index(offer.method)).method
        fitting = [offer for offer in fitting if offer.method == best]
    priced = [offer for offer in fitting if offer.usd_per_million_tokens is not None]
    if goal == "fastest" or not priced:
        return max(fitting, key=lambda offer: offer.tokens_per_second.middle, default=None)

    def cost(offer: Offer) -> float:
        each = offer.usd_per_million_tokens or 0.0
        return each if goal == "best" else each / offer.tokens_per_second.middle

    return min(priced, key=cost)


def _costs_at_most(offer: Offer, budget: float | None) -> bool:
    return (
        budget is not None and offer.fits and offer.usd is not None and offer.usd.middle <= budget
    )


def _cheaper(offer: Offer, affordable: Sequence[Offer], budget: float | None) -> Iterator[str]:
    """Yield what is within the budget, if the plan is not."""
    if budget is None or offer.usd is None or offer.usd.middle <= budget:
        return
    if affordable:
        best = min(affordable, key=lambda one: one.usd.middle if one.usd else 0.0)
        cost = best.usd.middle if best.usd else 0.0
        yield f"{best.gpu}: about {cost:,.2f} USD ({best.method})"
    else:
        share = budget / offer.usd.middle
        yield f"{share:.0%} of the steps, by training.max_steps or training.num_train_epochs"


def _for_ranks(gpus: Sequence[Gpu], gpu: Gpu | None, ranks: int) -> Sequence[Gpu]:
    """Return the kinds that several ranks can train on: complete GPUs.

    Raises:
        BadInput: there are none, or the user wants MIG devices.
    """
    if ranks == 1:
        return gpus
    whole = [each for each in gpus if not each.profile]
    if not whole or (gpu is not None and gpu.profile):
        raise BadInput(
            f"{ranks} x {(gpu or gpus[-1]).name}: a process sees one MIG device, and MIG devices "
            "have no direct way to each other",
            remedy="plan for one of them, a larger profile, or complete GPUs",
        )
    return whole


def _by_table(job: Workload) -> Offer:
    choice = _choose(job, options(job) or requested_options(job))
    return offer_of(job, choice, by_table(job, choice))


def _choose(job: Workload, candidates: Sequence[TrainingOption]) -> Choice:
    return as_learned(job, choose(job, for_goal(job, candidates)))


def _options(job: Workload) -> list[TrainingOption]:
    result, strategy = options(job), job.config.compute.strategy
    optim = job.config.training.optim
    unsupported = optimizer_spec(optim).unsupported.items()
    why = next((why for feature, why in unsupported if feature == job.precision), "")
    if not result and why:
        raise BadInput(
            f"training.optim = {optim!r}: {why}, and training on {job.machine.gpu.name} is in "
            f"{job.precision}",
            remedy=f"set training.{job.precision}=false, or use {DEFAULT}",
        )
    if not result and strategy != AUTO and job.not_supported_by(strategy):
        raise BadInput(
            f"compute.strategy = {strategy!r}: {job.machine.gpu.name} has no bfloat16, and "
            "float16 does not support sharding",
            remedy="use ddp, or another GPU",
        )
    if not result:
        raise BadInput(
            f"compute.strategy = {strategy!r} cannot be combined with "
            f"compute.offload = {job.config.compute.offload!r}",
            remedy="leave one of the two out",
        )
    return result


def _cheapest(gpus: Sequence[Gpu], offers: Sequence[Offer]) -> tuple[Gpu, str]:
    """Return the cheapest if prices are known, else the fastest; the largest if none fits.

    Also return which of these it is.
    """
    fitting = [offer for offer in offers if offer.fits]
    priced = [offer for offer in fitting if offer.usd_per_million_tokens is not None]
    if priced:
        name = min(priced, key=lambda offer: offer.usd_per_million_tokens or 0.0).gpu
        how = "cheapest GPU that fits"
    elif fitting:
        name = max(fitting, key=lambda offer: offer.tokens_per_second.middle).gpu
        how = "fastest GPU that fits, as none of these has a price"
    else:
        name = max(gpus, key=lambda gpu: gpu.memory).name
        how = "largest GPU, as none fits"
    return next(gpu for gpu in gpus if gpu.name == name), how
