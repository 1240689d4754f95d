"""Where a run on a known GPU begins: what the plan chooses of all that is not learned from.

Strategy, offload, activation checkpointing and the micro-batch decide what fits and how fast it
is, and nothing of what is learned; the rest of a plan is for people to decide.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.config.compute import Offload, Strategy
from steadytrain.components.shared.decision import Decision
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.train.plan.batch import BatchPlan
from steadytrain.components.train.plan.decisions import efficiency
from steadytrain.components.train.plan.fit import Choice, at, fitting
from steadytrain.components.train.plan.hardware import find_gpu
from steadytrain.components.train.plan.machine import Job, Machine
from steadytrain.components.train.plan.model import model_name, model_shape
from steadytrain.components.train.plan.strategy import Way, ways

_OPEN: Final[dict[str, dict[str, Any]]] = {
    "compute": {"strategy": "auto", "offload": "none"},
    "training": {"gradient_checkpointing": False},
}
"""By section, what is as good as not said."""


@dataclass(frozen=True)
class Start:
    """How a run begins, and why: in a sentence, and field by field."""

    batch: BatchPlan
    reason: str
    decisions: Sequence[Decision]


def planned_start(
    config: RunConfig, device: str, nodes: int, length: int, host_memory: int | None = None
) -> Start | None:
    """The plan's choice; None where it has none: another device or model, or nothing fits.

    Args:
        device: as the driver names it, or a node's label.
        nodes: that there are.
        length: tokens of the longest prepared row; 0 where the data do not say.
        host_memory: bytes of each node's own; None: not known.
    """
    try:
        job = _job(config, device, nodes, length, host_memory)
        choice = fitting(job, ways(job))
    except BadInput:
        # What is wrong with a configuration others say; here it is only not known.
        return None
    return Start(choice.plan, _reason(job, choice), efficiency(job, choice)) if choice else None


def estimated_memory(
    config: RunConfig, device: str, nodes: int, length: int, plan: BatchPlan
) -> int | None:
    """Bytes of a rank with a plan, by the formula; None where it knows device or model not.

    Args:
        device, nodes, length: as for `planned_start`.
    """
    try:
        job = _job(config, device, nodes, length)
    except BadInput:
        return None
    way = Way(
        config.model.adapter.kind,
        cast(Strategy, plan.strategy),
        plan.gradient_checkpointing,
        config.training.optim,
        cast(Offload, plan.offload),
    )
    return at(job, way, plan.micro_batch_size).memory.total


def _job(
    config: RunConfig, device: str, nodes: int, length: int, host_memory: int | None = None
) -> Job:
    machine = Machine(find_gpu(device), nodes, config.compute.nproc_per_node, host_memory)
    content = config.model_dump()
    if length:
        content["data"]["sequence_length"] = length
    for section, fields in _OPEN.items():
        for name, value in fields.items():
            if content[section][name] == value:
                del content[section][name]
    opened = RunConfig.model_validate(content)
    return Job(opened, model_name(config), model_shape(config), machine)


def _reason(job: Job, choice: Choice) -> str:
    memory = choice.memory
    return (
        f"micro-batch x accumulation {choice.plan} on {job.machine}: a rank of {job.name} "
        f"needs {memory.total / 1e9:.1f} of {choice.capacity / 1e9:g} GB by the plan's formula"
    )
