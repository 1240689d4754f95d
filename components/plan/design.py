"""A plan as three answers: the pipeline, how ranks share the work, and what it costs.

The models here are the published schemas: `steadytrain design --json` follows the one that
`steadytrain schema --design` prints, and `steadytrain plan --json` that of `schema --plan`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from steadytrain.components.plan.offer import no_price, over_budget, policy
from steadytrain.components.preprocess.inputs import inputs_of
from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.config.strategies import AUTO
from steadytrain.components.shared.errors import BadInput, DataError, StorageError
from steadytrain.components.shared.quantities import durations, size
from steadytrain.components.sizing.time_cost import Span

if TYPE_CHECKING:
    from steadytrain.components.plan.networks import NetworkPlan
    from steadytrain.components.plan.plan import Plan
    from steadytrain.components.plan.series import SeriesPlan
    from steadytrain.components.plan.tables import TablePlan

    AnyPlan = Plan | NetworkPlan | SeriesPlan | TablePlan

Strategy = Literal["none", "data_parallel", "fsdp", "deepspeed"]
_STRATEGIES: Final[dict[str, Strategy]] = {"single": "none", "ddp": "data_parallel", "fsdp": "fsdp"}
_DECIDED: Final = (
    *("compute.strategy", "compute.offload", "training.gradient_checkpointing"),
    *("model.adapter.kind", "model.adapter.frozen_embeddings", "model.adapter.frozen_head"),
)
"""Decisions whose reasons are tips for whoever trains elsewhere."""
_PORT: Final = 29500
_DIALECT: Final = "https://json-schema.org/draft/2020-12/schema"
_SHARED: Final = ("pipeline_config", "distributed_config", "cost_estimate", "storage")
"""What `steadytrain plan --json` has of a design."""


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Component(_Part):
    """A step of the pipeline, as the compiled file defines it."""

    name: str
    title: str
    image: str
    function: str = Field(description="The function of steadytrain's components that it calls.")
    inputs: list[str]
    outputs: list[str]
    depends_on: list[str] = Field(description="Steps that end before this one begins.")
    condition: str = Field(description="When it runs; empty if always.")
    requests: dict[str, str]
    limits: dict[str, str]


class Trigger(_Part):
    """A way to start the pipeline."""

    kind: Literal["schedule", "event", "manual"]
    command: str
    description: str


class TrainingPods(_Part):
    """The pods that the train step asks for, one for each node."""

    count: int
    gpus: int
    gpu: str | None = Field(description="Kind of GPU; null on CPUs.")
    gpu_resource: str
    cpu: str
    memory: str


class Deployment(_Part):
    """How the pipeline gets onto a cluster."""

    compile: str
    submit: str
    volume_mount: str
    training_pods: TrainingPods | None = Field(
        description="null if training runs in the train step's own pod."
    )


class PipelineConfig(_Part):
    """The pipeline: what runs it, its steps, and what starts it."""

    orchestrator: Literal["kubeflow_pipelines"]
    pipeline: str
    steps: list[Component]
    triggers: list[Trigger]
    deployment: Deployment


class DistributedConfig(_Part):
    """How the ranks share the work."""

    strategy: Strategy
    world_size: int = Field(ge=1)
    backend: Literal["nccl", "gloo", "none"]
    compute_strategy: str | None = Field(
        description="The value of compute.strategy; null if no ranks are started."
    )
    launch: dict[str, str] = Field(
        description='Commands by launcher. Those with "$@" take your own program and its arguments.'
    )
    tips: list[str]


class Interval(_Part):
    """The ends of an estimate."""

    low: float
    high: float


class InferencePrice(_Part):
    """What serving costs on the same devices. Without a price of them, `unknown` says why."""

    tokens_per_second: float = Field(gt=0, description="Of all devices together, as given.")
    usd_per_million_tokens: float | None
    unknown: str


class CostEstimate(_Part):
    """What training costs. A number that is not known is null, and `unknown` says why."""

    hourly_cost_usd: float | None = Field(description="Of all devices together, on demand.")
    estimated_duration_hours: float | None = Field(
        description="The geometric mean of `duration_hours`."
    )
    total_cost_usd: float | None = Field(description="The product of the two.")
    duration_hours: Interval | None
    budget_usd: float | None
    within_budget: bool | None
    prices: str
    unknown: list[str]
    inference: InferencePrice | None = Field(None, description="null without --tokens-per-second.")

    def serving(self, tokens_per_second: float) -> CostEstimate:
        """Return the estimate with the price of inference at a throughput; 0 means not given."""
        if not tokens_per_second:
            return self
        hourly, unknown = self.hourly_cost_usd, ""
        price = None if hourly is None else hourly / 3600 / tokens_per_second * 1e6
        if price is None:
            unknown = next(
                (reason for reason in self.unknown if reason.startswith("price: ")),
                "price: set compute.price_per_hour",
            )
        result = InferencePrice(
            tokens_per_second=tokens_per_second, usd_per_million_tokens=price, unknown=unknown
        )
        return self.model_copy(update={"inference": result})

    def inference_lines(self) -> Iterator[str]:
        """Yield the price of inference for people, if a throughput is given."""
        if (result := self.inference) is None:
            return
        price, speed = result.usd_per_million_tokens, f"{result.tokens_per_second:,g} tokens/s"
        usd = f"not known ({result.unknown})" if price is None else f"{price:,.4g}"
        yield f"inference  {usd} USD per million tokens at {speed} of all devices"


class Storage(_Part):
    """Disk space of a run in GB; null where it is not known.

    The space for the data is that of their files and of a prepared copy of about the same size.
    """

    data_gb: float | None
    checkpoints_gb: float | None = Field(
        description="Weights and the optimizer's state of trained parameters, for the checkpoints "
        "that training.save_total_limit keeps, the best one and the one that is being written. Of "
        "boosted trees, the most that they can take; of other learners, as a few steps have it."
    )
    model_gb: float | None = Field(description="The exported weights, or what else was learned.")
    total_gb: float = Field(description="Of what is known.")
    available_gb: float | None

    def line(self) -> str:
        """Return the space for people."""
        parts = {"data": self.data_gb, "checkpoints": self.checkpoints_gb, "model": self.model_gb}
        sizes = ", ".join(
            f"{name} {'not known' if gb is None else size(1e9 * gb)}" for name, gb in parts.items()
        )
        return f"storage   {sizes}"


Pipeline = Callable[[TrainingPods | None], PipelineConfig]
"""Returns the pipeline with the pods that train; None if the train step trains itself."""


class Design(_Part):
    """What `steadytrain design --json` prints."""

    works: bool
    problems: list[str]
    remedies: list[str]
    pipeline_config: PipelineConfig
    distributed_config: DistributedConfig
    cost_estimate: CostEstimate
    storage: Storage

    def serving(self, tokens_per_second: float) -> Design:
        """Return the design with the price of inference at a throughput; 0 means not given."""
        cost = self.cost_estimate.serving(tokens_per_second)
        return self.model_copy(update={"cost_estimate": cost})

    def parts(self) -> dict[str, Any]:
        """Return what `steadytrain plan --json` has of it."""
        return self.model_dump(mode="json", include={*_SHARED})

    def lines(self) -> Iterator[str]:
        """Yield the design for people."""
        pipeline, ranks, cost = self.pipeline_config, self.distributed_config, self.cost_estimate
        yield f"pipeline_config     {pipeline.orchestrator}, pipeline {pipeline.pipeline}"
        for step in pipeline.steps:
            after = f" after {', '.join(step.depends_on)}" if step.depends_on else ""
            when = f", if {step.condition}" if step.condition else ""
            wants = f"{step.requests['cpu']} CPU, {step.requests['memory']}"
            yield f"  step     {step.name} ({step.image}, {wants}){after}{when}"
        if pods := pipeline.deployment.training_pods:
            gpus = f", {pods.gpus} x {pods.gpu}" if pods.gpu else ""
            yield f"  pods     {pods.count} for training, each {pods.cpu} CPU, {pods.memory}{gpus}"
        yield from (f"  trigger  {each.kind}: {each.command}" for each in pipeline.triggers)
        yield ""
        yield (
            f"distributed_config  strategy {ranks.strategy}, world_size {ranks.world_size}, "
            f"backend {ranks.backend}"
        )
        yield from (f"  launch   {name}: {command}" for name, command in ranks.launch.items())
        yield from (f"  tip      {tip}" for tip in ranks.tips)
        yield ""
        numbers = (cost.hourly_cost_usd, cost.estimated_duration_hours, cost.total_cost_usd)
        hourly, hours, total = ("not known" if n is None else _rounded(n) for n in numbers)
        yield "cost_estimate"
        yield f"  hourly_cost_usd           {hourly} ({cost.prices})"
        span = cost.duration_hours
        ends = f" ({durations(3600 * span.low, 3600 * span.high)})" if span else ""
        yield f"  estimated_duration_hours  {hours}{ends}"
        yield f"  total_cost_usd            {total}"
        if cost.budget_usd is not None:
            verdict = {True: "within", False: "over", None: "not checked against"}
            yield f"  {verdict[cost.within_budget]} the budget of {cost.budget_usd:,.2f} USD"
        yield from (f"  not known: {reason}" for reason in cost.unknown)
        yield from (f"  {line}" for line in cost.inference_lines())
        yield ""
        yield self.storage.line()
        if not self.works:
            yield ""
            yield "DOES NOT WORK"
            yield from (f"  problem {problem}" for problem in self.problems)
            yield from (f"  nearest {remedy}" for remedy in self.remedies)


def _rounded(value: float) -> str:
    """Format hours or USD with two decimals; below 0.1 with two significant digits."""
    return f"{value:,.2f}" if value >= 0.1 or value == 0 else f"{value:.2g}"


def distributed_config(plan: Plan) -> DistributedConfig:
    """Return how the ranks of a planned training run share the work."""
    machine = plan.job.machine
    tips = [
        f"{decision.field}: {decision.reason}"
        for decision in plan.decisions
        if decision.field in _DECIDED
    ]
    if plan.scaling:
        tips.append(policy(plan.job, plan.scaling))
    if machine.nodes > 1:
        tips.append("NCCL_DEBUG=INFO shows which network the nodes use to talk to each other")
    return DistributedConfig(
        strategy=_strategy(plan.choice.option.strategy),
        world_size=machine.ranks,
        backend="nccl" if machine.gpu.cuda else "gloo",
        compute_strategy=plan.choice.option.strategy,
        launch={
            **_launch(machine.nodes, machine.per_node),
            **(_accelerate(machine.nodes) if plan.has_accelerate else {}),
            "trainjob": "kubectl apply -f trainjob.yaml",
        },
        tips=[*tips, *plan.remarks],
    )


def _strategy(name: str) -> Strategy:
    return "deepspeed" if name.startswith("zero") else _STRATEGIES.get(name, "data_parallel")


def _launch(nodes: int, per_node: int) -> dict[str, str]:
    """Return the commands that start the ranks of a run, or of another program."""
    rendezvous = "--standalone"
    if nodes > 1:
        rendezvous = f'--nnodes={nodes} --rdzv-backend=c10d --rdzv-endpoint="$MASTER_ADDR:{_PORT}"'
    return {
        "steadytrain": f"steadytrain {'submit' if nodes > 1 else 'run'} steadytrain.yaml",
        "torchrun": f'torchrun {rendezvous} --nproc-per-node={per_node} "$@"',
    }


def _accelerate(nodes: int) -> dict[str, str]:
    """Return the command that reads the plan's accelerate.yaml."""
    rank = ' --machine_rank="$NODE_RANK" --main_process_ip="$MASTER_ADDR"' if nodes > 1 else ""
    common = f"accelerate launch --config_file=accelerate.yaml --main_process_port={_PORT}"
    return {"accelerate": f'{common}{rank} "$@"'}


def cost_estimate(plan: Plan) -> CostEstimate:
    """Return what a planned training run costs on demand."""
    offer, machine = plan.offer, plan.job.machine
    hourly = plan.job.config.compute.price_per_hour
    if hourly is None and machine.gpu.usd_per_hour is not None:
        hourly = machine.gpu.usd_per_hour * machine.ranks
    return _cost(plan.job.config, offer.hours, hourly, plan.prices, list(plan.unknown))


def _cost(
    config: RunConfig,
    hours: Span | None,
    hourly: float | None,
    prices: str,
    unknown: list[str],
) -> CostEstimate:
    total = None if hours is None or hourly is None else hours.middle * hourly
    budget = config.compute.budget_usd
    return CostEstimate(
        hourly_cost_usd=hourly,
        estimated_duration_hours=hours.middle if hours else None,
        total_cost_usd=total,
        duration_hours=Interval(low=hours.low, high=hours.high) if hours else None,
        budget_usd=budget,
        within_budget=None if budget is None or total is None else total <= budget,
        prices=prices,
        unknown=unknown,
    )


def training_pods(config: RunConfig, gpu: str | None) -> TrainingPods:
    """Return the pods that train a completed configuration."""
    compute = config.compute
    return TrainingPods(
        count=compute.nodes,
        gpus=compute.gpus_of_a_node,
        gpu=gpu if compute.gpus_of_a_node else None,
        gpu_resource=compute.pods.gpu_resource,
        cpu=compute.pods.cpu,
        memory=compute.pods.memory,
    )


@dataclass(frozen=True)
class Resources:
    """The inputs of a design besides the configuration.

    data_bytes: of the source; None if unknown.
    host_memory: bytes of each node; None if unknown.
    disk: available bytes; None if unknown.
    """

    data_bytes: int | None
    host_memory: int | None = None
    disk: int | None = None


def source_bytes(config: RunConfig) -> int | None:
    """Return the stored size of the data; None if it is not known before they are read."""
    try:
        return inputs_of(config).stored_bytes
    except (BadInput, DataError, StorageError, OSError):
        return None


def storage_of(plan: AnyPlan, config: RunConfig, resources: Resources) -> Storage:
    """Return the disk space of a run."""
    kept = config.training.save_total_limit + 2
    data = None if resources.data_bytes is None else 2 * resources.data_bytes / 1e9
    stored = plan.stored
    checkpoints = None if stored is None else kept * stored.checkpoint / 1e9
    model = None if stored is None else stored.model / 1e9
    return Storage(
        data_gb=data,
        checkpoints_gb=checkpoints,
        model_gb=model,
        total_gb=sum(part or 0.0 for part in (data, checkpoints, model)),
        available_gb=None if resources.disk is None else resources.disk / 1e9,
    )


def design_of_plan(
    plan: Plan, config: RunConfig, pipeline: Pipeline, resources: Resources
) -> Design:
    """Return the design for a model of texts."""
    from steadytrain.components.plan.render import filled

    return _checked(
        list(plan.problems),
        list(plan.remedies),
        pipeline(training_pods(filled(plan), plan.job.machine.gpu.name)),
        distributed_config(plan),
        cost_estimate(plan),
        storage_of(plan, config, resources),
    )


def design_of_network(
    plan: NetworkPlan, config: RunConfig, pipeline: Pipeline, resources: Resources
) -> Design:
    """Return the design for a model of images or of mixed records."""
    return _checked(
        [] if plan.works else ["the memory of a device is not enough"],
        [],
        pipeline(training_pods(config, plan.device)),
        _copies(config, plan.ranks, plan.device != "CPU", plan.remarks),
        _cost_on(plan, config, plan.device, plan.hours, ""),
        storage_of(plan, config, resources),
    )


def design_of_table(
    plan: TablePlan, config: RunConfig, pipeline: Pipeline, resources: Resources
) -> Design:
    """Return the design for a model of a table, which one process learns on a CPU."""
    tips = [*plan.remarks]
    if plan.threads is not None:
        tips.insert(0, f"one process with {plan.threads} threads; more nodes are not used")
    if plan.memory is not None:
        tips.insert(1, f"the matrix takes {size(plan.memory)}; reading and binning take more")
    remedy = "fewer columns, or a sample of the records"
    return _checked(
        list(_too_large("the matrix", plan.memory, resources, remedy)),
        [],
        pipeline(None),
        _one_process(tips),
        _cost_on(plan, config, "CPU", plan.hours, plan.unknown_time),
        storage_of(plan, config, resources),
    )


def design_of_series(
    plan: SeriesPlan, config: RunConfig, pipeline: Pipeline, resources: Resources
) -> Design:
    """Return the design for a model of time series. Only networks have several ranks and pods."""
    compute, hours = config.compute, (plan.seconds or 0) / 3600
    device = "a GPU whose kind is open" if compute.device == "cuda" else "CPU"
    pods, ranks = None, _one_process(plan.remarks)
    if plan.framework == "pytorch":
        pods = training_pods(config, None)
        ranks = _copies(config, compute.world_size, compute.device == "cuda", plan.remarks)
    timed = "`steadytrain plan FILE` times a step"
    return _checked(
        list(_too_large("what it learns from", plan.memory, resources, "or fewer series")),
        [],
        pipeline(pods),
        ranks,
        _cost_on(plan, config, device, Span.of(hours) if hours else None, timed),
        storage_of(plan, config, resources),
    )


def _cost_on(
    plan: NetworkPlan | TablePlan | SeriesPlan,
    config: RunConfig,
    device: str,
    hours: Span | None,
    untimed: str,
) -> CostEstimate:
    """Return what training costs at the user's own price, or at the plan's for the device.

    Args:
        untimed: why the hours are not known, if they are not.
    """
    unknown = [] if hours else [f"hours: {untimed}"]
    own = config.compute.price_per_hour
    if own is not None:
        return _cost(config, hours, own, "compute.price_per_hour", unknown)
    if plan.usd_per_hour is None:
        unknown.append(no_price(plan.prices, device))
    return _cost(config, hours, plan.usd_per_hour, plan.prices, unknown)


def _copies(config: RunConfig, ranks: int, cuda: bool, tips: list[str]) -> DistributedConfig:
    """Return the configuration of ranks with a copy of the model each."""
    compute = config.compute
    strategy = compute.strategy
    if strategy == AUTO:
        strategy = "single" if ranks == 1 else "ddp"
    return DistributedConfig(
        strategy=_strategy(strategy),
        world_size=ranks,
        backend="nccl" if cuda else "gloo",
        compute_strategy=strategy,
        launch=_launch(compute.nodes, compute.nproc_per_node),
        tips=tips,
    )


def _too_large(what: str, memory: int | None, resources: Resources, remedy: str) -> Iterator[str]:
    """Yield a sentence if a node has not enough memory."""
    room = resources.host_memory
    if memory is not None and room is not None and memory > room:
        yield (
            f"{what} needs {memory / 1e9:.1f} GB, and the machine has {room / 1e9:.1f} GB of "
            f"memory: take a larger machine, {remedy}"
        )


def _one_process(tips: list[str]) -> DistributedConfig:
    """Return the configuration of a model that one process learns on a CPU."""
    return DistributedConfig(
        strategy="none",
        world_size=1,
        backend="none",
        compute_strategy=None,
        launch={"steadytrain": "steadytrain run steadytrain.yaml"},
        tips=tips,
    )


def _checked(
    problems: list[str],
    remedies: list[str],
    pipeline: PipelineConfig,
    ranks: DistributedConfig,
    cost: CostEstimate,
    storage: Storage,
) -> Design:
    """Return the design, with the problems of a budget and of the disk."""
    over = over_budget(cost.budget_usd, cost.total_cost_usd, "; ".join(cost.unknown))
    # A plan of texts has it already.
    result = list(dict.fromkeys([*problems, *over]))
    if storage.available_gb is not None and storage.total_gb > storage.available_gb:
        result.append(
            f"the run needs {storage.total_gb:,.1f} GB of disk, and {storage.available_gb:,.1f} GB "
            "are there: lower training.save_total_limit, or take a larger volume"
        )
    return Design(
        works=not result,
        problems=result,
        remedies=remedies,
        pipeline_config=pipeline,
        distributed_config=ranks,
        cost_estimate=cost,
        storage=storage,
    )


def scripts(ranks: DistributedConfig) -> Mapping[str, str]:
    """Return the launch scripts by file name; each takes a program and its arguments."""
    return {
        f"{name}.sh": f"#!/bin/sh\n# Usage: sh {name}.sh PROGRAM.py ARGUMENTS\nexec {command}\n"
        for name, command in ranks.launch.items()
        if "$@" in command
    }


def schema() -> dict[str, Any]:
    """Return the JSON Schema of a design."""
    return {"$schema": _DIALECT, **Design.model_json_schema()}


def schema_of_plans() -> dict[str, Any]:
    """Return the JSON Schema of a plan: what it has of a design, besides fields of its task."""
    whole = schema()
    return {
        **whole,
        "title": "Plan",
        "description": "What `steadytrain plan --json` prints. Other fields depend on the task.",
        "properties": {name: whole["properties"][name] for name in _SHARED},
        "required": [*_SHARED],
        "additionalProperties": True,
    }
