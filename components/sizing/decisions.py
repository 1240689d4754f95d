"""Each choice of a plan with a one-sentence reason, and how a run on a known GPU starts.

User settings are repeated, not evaluated. For a run, the plan chooses only what does not affect
what the model learns: strategy, offload, activation checkpointing and the micro-batch determine
what fits and how fast it is. The rest of a plan is for people to decide.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, cast

from steadytrain.components.memory.model import model_name, model_shape
from steadytrain.components.memory.states import frozen_decisions, matrix_share
from steadytrain.components.shared.config import AdapterConfig, RunConfig
from steadytrain.components.shared.config.fields import Decision, set_by_user
from steadytrain.components.shared.config.optimizers import DEFAULT, optimizer_spec
from steadytrain.components.shared.config.strategies import DISK, Offload
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.shared.quantities import duration
from steadytrain.components.sizing.batch import BatchPlan
from steadytrain.components.sizing.checkpoints import by_default, is_worth
from steadytrain.components.sizing.fit import HOST_SPARE, Choice, at, fitting
from steadytrain.components.sizing.hardware import GIB, find_gpu
from steadytrain.components.sizing.length import prepared
from steadytrain.components.sizing.machine import Machine, Workload
from steadytrain.components.sizing.recipe import MEDIUM_BATCH, recipe
from steadytrain.components.sizing.strategy import BILLION, TrainingOption, options
from steadytrain.components.sizing.time_cost import Span, by_table, preemptions

_SIZE_RULE: Final = "rule: strategy by size"
_SMALL_CARD: Final = "rule for 6 GB cards"


def decisions(job: Workload, choice: Choice, speed: Span) -> list[Decision]:
    """Return all decisions of a plan.

    Args:
        speed: in tokens per second.
    """
    return [
        *efficiency(job, choice),
        *recipe_of_plan(job, choice),
        _attention(job),
        *_checkpoints(job, choice, speed),
    ]


def recipe_of_plan(job: Workload, choice: Choice) -> list[Decision]:
    """Return the recipe of a plan, whose global batch scales the learning rate."""
    training = job.config.training.model_copy(update={"global_batch_size": job.global_batch})
    config = job.config.model_copy(update={"training": training})
    return recipe(config, choice.setting.adapter, job.shape.parameters, job.is_set)


def efficiency(job: Workload, choice: Choice) -> list[Decision]:
    """Return the decisions about memory and speed."""
    result = [
        Decision("compute.strategy", choice.option.strategy, _strategy(job, choice)),
        Decision("compute.offload", choice.option.offload, _offload(job, choice)),
        Decision("model.adapter.kind", choice.option.adapter, _adapter(job, choice)),
        *frozen_decisions(job.shape, choice.setting),
        _precision(job),
        Decision(
            "training.gradient_checkpointing", choice.option.recompute, _recompute(job, choice)
        ),
        Decision("training.optim", choice.option.optim, _optimizer(job, choice)),
        *_batch(job, choice),
        *_pods(job, choice),
    ]
    return [_as_learned(choice, _as_given(job, decision)) for decision in result]


def _as_given(job: Workload, decision: Decision) -> Decision:
    """Return the user's own value if it is set."""
    return set_by_user(job.config, decision.field) if job.is_set(decision.field) else decision


def _as_learned(choice: Choice, decision: Decision) -> Decision:
    """Apply what an earlier run found out; the user's own value stays an upper bound."""
    learned = choice.learned.get(decision.field)
    if learned is None:
        return decision
    return replace(
        decision, reason=f"{decision.reason}, but {learned}" if decision.yours else learned
    )


def _strategy(job: Workload, choice: Choice) -> str:
    count, strategy = job.shape.parameters, choice.option.strategy
    if strategy == "single":
        return f"one {job.machine.gpu.kind} has nothing to shard across"
    if strategy == "ddp":
        if choice.setting.adapter.freezes:
            return "each GPU holds the frozen model, and only the adapters' gradients are exchanged"
        return (
            f"below 1 billion parameters each {job.machine.gpu.kind} holds the whole model "
            f"({_SIZE_RULE})"
        )
    if prefer := job.config.compute.prefer:
        parts = {"zero2": "gradients and optimizer state, the fastest that shards"}
        shared = parts.get(strategy, "all states")
        return f"compute.prefer = {prefer}: the ranks shard {shared}"
    if count < BILLION:
        return "with DDP each GPU would need more memory than it has, so the states are sharded"
    if count < 10 * BILLION:
        return f"from 1 to 10 billion parameters the ranks shard all states ({_SIZE_RULE})"
    return f"from 10 to 100 billion parameters: ZeRO-3 ({_SIZE_RULE})"


def _offload(job: Workload, choice: Choice) -> str:
    if choice.option.offload == "none":
        fits = f"what a rank needs fits on its {job.machine.gpu.kind}"
        return fits if choice.fits else "slow, so only if asked for"
    if choice.option.offload == DISK:
        return f"files hold the optimizer state: {choice.memory.disk / 1e9:.0f} GB per rank"
    return (
        "from 10 to 100 billion parameters, host memory holds what does not fit "
        f"({_SIZE_RULE}): {choice.memory.host / 1e9:.0f} GB per rank"
    )


def _adapter(job: Workload, choice: Choice) -> str:
    if choice.option.adapter == "none":
        whole = "a model from scratch has nothing to adapt" if job.from_scratch else ""
        return whole or "training all weights fits, so none are frozen"
    if choice.option.adapter == "lora" and job.config.training.goal == "fastest":
        return "training.goal = fastest: frozen weights need no gradients, a third of the work"
    # A 32-bit weight, its gradient, and what the optimizer keeps for it.
    unfrozen = replace(choice.setting, adapter=AdapterConfig())
    spec = optimizer_spec(job.config.training.optim)
    each = 8 + spec.device_bytes(matrix_share(job.shape, unfrozen))
    full = each * job.shape.parameters / 1e9 / job.machine.ranks
    short = f"training all weights takes {each:.3g} bytes each, {full:.0f} GB per rank at least"
    if choice.option.adapter == "lora":
        return f"{short}; low-rank adapters leave them frozen"
    return f"{short}, and even frozen in 16 bits they do not fit; 4 bits (NF4) take the least"


def _precision(job: Workload) -> Decision:
    gpu = job.machine.gpu
    if job.precision == "fp32":
        fp16 = job.is_set("training.fp16") and not job.is_set("training.bf16")
        field = "training.fp16" if fp16 else "training.bf16"
        return Decision(field, False, "this CPU has no instructions for bfloat16")
    reason = "computes in bfloat16, which needs no loss scaling"
    if not gpu.cuda:
        reason = "has instructions for bfloat16, which are several times as fast"
    if job.precision == "fp16":
        reason = "has no bfloat16, so float16 with loss scaling"
    return Decision(f"training.{job.precision}", True, f"{gpu.name} {reason}")


def _recompute(job: Workload, choice: Choice) -> str:
    if job.short_of_memory:
        return f"activations are recomputed in the backward pass ({_SMALL_CARD})"
    if not choice.option.recompute:
        return "activations fit, and recomputing them would take a third more time"
    if job.shape.parameters >= 10 * BILLION and choice.option.adapter == "none":
        return f"from 10 to 100 billion parameters ({_SIZE_RULE})"
    return "memory is the bottleneck (rule: activation checkpointing first)"


def _optimizer(job: Workload, choice: Choice) -> str:
    if choice.option.optim == DEFAULT:
        where = {"none": f"on the {job.machine.gpu.kind}", DISK: "on disk"}.get(
            choice.option.offload, "on the host"
        )
        return f"AdamW is the default (rule: optimizers); its state is {where}"
    if job.short_of_memory:
        return f"in 8 bits, and in host memory when the GPU's runs short ({_SMALL_CARD})"
    return "AdamW's state in a quarter of the memory makes it possible to train all weights"


def _batch(job: Workload, choice: Choice) -> Iterator[Decision]:
    batch, ranks = choice.batch, job.machine.ranks
    reason = MEDIUM_BATCH
    if job.short_of_memory:
        reason = f"micro-batch 1 with accumulation 8 to 16 ({_SMALL_CARD})"
    yield Decision("training.global_batch_size", batch.global_batch_size, reason)
    whole = "the rank's whole share of the global batch fits"
    if batch.gradient_accumulation_steps > 1:
        whole = (
            f"with accumulation {batch.gradient_accumulation_steps} on {ranks} "
            f"rank{'s' if ranks > 1 else ''} it is the global batch, "
            + ("and more does not fit" if job.machine.gpu.cuda else "as a run on a CPU starts")
        )
    if job.short_of_memory:
        whole = (
            f"with accumulation {batch.gradient_accumulation_steps} it is the global batch "
            f"({_SMALL_CARD})"
        )
    yield Decision("training.micro_batch_size", batch.micro_batch_size, whole)


def _pods(job: Workload, choice: Choice) -> Iterator[Decision]:
    """Yield the pods' memory on a cluster, where a pod has only the memory that it requests."""
    if not (job.hosts.of_a_cluster and choice.host_needed):
        return
    from kubernetes.utils import parse_quantity

    needed = math.ceil(choice.host_needed / (1 - HOST_SPARE) / GIB)
    if needed * GIB > parse_quantity(job.config.compute.pods.memory):
        reason = (
            f"{choice.host_needed / 1e9:.0f} GB are offloaded from the GPUs of a node, and the "
        )
        yield Decision("compute.pods.memory", f"{needed}Gi", f"{reason}processes need memory too")


def _attention(job: Workload) -> Decision:
    """Return what `training.attention: auto` becomes; the configuration keeps auto."""
    field, given = "training.attention", job.config.model.config.get("attn_implementation")
    if job.is_set(field):
        return set_by_user(job.config, field)
    if given is not None:
        reason = f"{given}: model.config.attn_implementation says so"
    elif job.shape.sdpa:
        reason = f"sdpa: Transformers has PyTorch's fused kernels for {job.shape.family}"
    else:
        reason = f"eager: Transformers has no fused kernels for {job.shape.family}"
    return Decision(field, None, f"auto becomes {reason}")


def _checkpoints(job: Workload, choice: Choice, speed: Span) -> Iterator[Decision]:
    """Yield the decisions about checkpoints.

    It is `epoch` if each epoch of few examples is worth a checkpoint, and none takes longer than
    what a failure may cost. Otherwise, it stays open, and a run goes by what it measures.
    """
    expected = preemptions(job, choice)
    interval, (examples, tokens, counted) = expected.interval_seconds, _epoch(job, choice)
    epoch = tokens / speed.middle
    if job.is_set("training.save_steps") or job.is_set("training.save_strategy"):
        for field in ("training.save_strategy", "training.save_steps"):
            if job.is_set(field):
                yield set_by_user(job.config, field)
        return
    rule = by_default(examples, counted)
    if epoch <= interval and is_worth(examples, epoch, expected.checkpoint_seconds):
        reason = f"{rule.reason}; an epoch takes about {duration(epoch)} here"
        yield Decision(rule.field, "epoch", reason)
        return
    steps = max(1, round(interval * speed.middle / (job.global_batch * choice.setting.length)))
    reason = f"{rule.reason}: about every {duration(interval)} here (steps: {steps})"
    yield replace(rule, reason=reason)


def _epoch(job: Workload, choice: Choice) -> tuple[float, float, str]:
    """Return an epoch's examples and tokens, and the examples in words.

    They are those of the prepared data or, before these, of the sample. Both are infinite if
    neither is known.
    """
    if job.sampled is not None:
        rows, tokens, documents = job.sampled.rows, job.sampled.tokens, job.sampled.documents
        if rows is not None and tokens is not None:
            counted = f"about {documents:,} training examples before preparation"
            return documents, rows * tokens, counted
    elif data := prepared(job.config):
        side = data.sides["train"]
        tokens = side.tokens or side.rows * choice.setting.length
        return side.documents, tokens, f"{side.documents:,} training examples"
    return math.inf, math.inf, ""


_OPEN: Final[dict[str, dict[str, Any]]] = {
    "compute": {"strategy": "auto", "offload": "none"},
    "training": {"gradient_checkpointing": False},
}
"""By section: values that count as not set."""


@dataclass(frozen=True)
class Start:
    """How a run starts, and why: in one sentence, and field by field."""

    batch: BatchPlan
    reason: str
    decisions: Sequence[Decision]


def planned_start(
    config: RunConfig, device: str, nodes: int, length: int, host_memory: int | None = None
) -> Start | None:
    """Return the plan's choice; None for an unknown device or model, or if nothing fits.

    Args:
        device: as the driver or a node's label names it.
        nodes: number of nodes.
        length: tokens of the longest prepared row; 0 if the data don't say.
        host_memory: bytes of host memory per node; None if unknown.
    """
    try:
        job = _job(config, device, nodes, length, host_memory)
        choice = fitting(job, options(job))
    except BadInput:
        # Other code reports a bad configuration; here it only means that there is no plan.
        return None
    return Start(choice.plan, _reason(job, choice), efficiency(job, choice)) if choice else None


def estimated_memory(
    config: RunConfig, device: str, nodes: int, length: int, plan: BatchPlan
) -> int | None:
    """Return the bytes of a rank with a plan, by the formula; None for an unknown device or model.

    Args:
        device, nodes, length: as for `planned_start`.
    """
    memory = estimate(config, device, nodes, length, plan)
    return memory.memory if memory else None


@dataclass(frozen=True)
class Estimate:
    """What the formula expects of a plan.

    memory: bytes of a rank.
    tokens_per_second: of all ranks together.
    """

    memory: int
    tokens_per_second: Span


def estimate(
    config: RunConfig, device: str, nodes: int, length: int, plan: BatchPlan
) -> Estimate | None:
    """Return what the formula expects of a plan; None for an unknown device or model.

    Args:
        device, nodes, length: as for `planned_start`.
    """
    try:
        job = _job(config, device, nodes, length)
    except BadInput:
        return None
    option = TrainingOption(
        config.model.adapter.kind,
        plan.settings.strategy,
        plan.settings.gradient_checkpointing,
        config.training.optim,
        cast(Offload, plan.settings.offload),
        config.model.adapter.frozen_embeddings,
        config.model.adapter.frozen_head,
    )
    choice = at(job, option, plan.micro_batch_size)
    return Estimate(choice.memory.total, by_table(job, choice).tokens_per_second)


def _job(
    config: RunConfig, device: str, nodes: int, length: int, host_memory: int | None = None
) -> Workload:
    machine = Machine(find_gpu(device), nodes, config.compute.nproc_per_node, host_memory)
    content = config.model_dump()
    if length:
        content["data"]["sequence_length"] = length
    for section, fields in _OPEN.items():
        for name, value in fields.items():
            if content[section][name] == value:
                del content[section][name]
    opened = RunConfig.model_validate(content)
    return Workload(opened, model_name(config), model_shape(config), machine)


def _reason(job: Workload, choice: Choice) -> str:
    memory = choice.memory
    return (
        f"micro-batch x accumulation {choice.plan} on {job.machine}: a rank of {job.name} "
        f"needs {memory.total / 1e9:.1f} of {choice.capacity / 1e9:g} GB by the plan's formula"
    )
