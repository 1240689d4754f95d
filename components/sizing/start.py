"""How a run on a known GPU starts: what the plan chooses without affecting what the model learns.

Strategy, offload, activation checkpointing and the micro-batch determine what fits and how fast it
is, but not what the model learns. The rest of a plan is for people to decide.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

from steadytrain.components.memory.model import model_name, model_shape
from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.config.fields import Decision
from steadytrain.components.shared.config.strategies import Offload
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.sizing.batch import BatchPlan
from steadytrain.components.sizing.decisions import efficiency
from steadytrain.components.sizing.fit import Choice, at, fitting
from steadytrain.components.sizing.hardware import find_gpu
from steadytrain.components.sizing.machine import Machine, Workload
from steadytrain.components.sizing.strategy import TrainingOption, options
from steadytrain.components.sizing.time_cost import Span, by_table

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
    found = estimate(config, device, nodes, length, plan)
    return found.memory if found else None


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
