"""What fits into a device's memory, learned by one run and used by the next one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from pydantic import model_validator

from steadytrain.components.shared.batch import BatchSettings
from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.config.strategies import Offload
from steadytrain.components.shared.digest import value_digest
from steadytrain.components.shared.effects import Use
from steadytrain.components.shared.records import Record
from steadytrain.components.shared.workspace import Workspace
from steadytrain.components.sizing.fit import Choice, at
from steadytrain.components.sizing.hardware import known_gpu
from steadytrain.components.sizing.length import prepared
from steadytrain.components.sizing.machine import Workload


class Learned(Record):
    """The largest micro-batch that trained, and the activation checkpointing and sharding used."""

    limit: BatchSettings

    @model_validator(mode="before")
    @classmethod
    def _nest(cls, content: Any) -> Any:
        """Read what earlier versions wrote: settings next to the schema version."""
        if not isinstance(content, dict) or "limit" in content:
            return content
        limit = {"strategy": "", **content}
        version = limit.pop("schema_version", 1)
        return {"schema_version": version, "limit": limit}


def learned_path(config: RunConfig, *, length: int, device: str, world_size: int) -> Path:
    """Return the file shared by all runs with equal memory needs: same model, precision, strategy.

    Args:
        length: tokens of the longest row; 0 if the data don't say.
        device: all names of one kind of device are equivalent.
    """
    decides = {
        **config.counted(Use.MEMORY),
        "model": config.counted(Use.TRAINING)["model"],
        "objectives": config.training.objectives,
        "weight_copies": config.training.weight_copies,
        "sequence_length": length,
        "device": _kind(device),
        "world_size": world_size,
    }
    return Workspace.of(config).learned(value_digest(decides))


def as_learned(job: Workload, choice: Choice) -> Choice:
    """Return the plan's choice, or a smaller one if an earlier similar run ran out of memory."""
    path = _path(job, _as_chosen(job, choice))
    if not path.is_file():
        return choice
    held = choice.plan.limited_to(Learned.load(path).limit)
    before, now = choice.plan.fields, held.fields
    option = replace(
        choice.option,
        recompute=held.settings.gradient_checkpointing,
        strategy=now["compute.strategy"],
        offload=cast(Offload, held.settings.offload),
    )
    reason = (
        f"learned: an earlier run on {job.machine.gpu.name} ran out of memory with more than "
        f"micro-batch x accumulation {held}; remove {path} to forget that"
    )
    learned = {field: reason for field, value in now.items() if value != before[field]}
    return replace(at(job, option, held.micro_batch_size), learned=learned)


def learned_otherwise(job: Workload, choice: Choice) -> Learned | None:
    """Return what runs with the unchanged configuration learned, if the plan differs from it."""
    path = _path(job, job.config)
    if path == _path(job, _as_chosen(job, choice)) or not path.is_file():
        return None
    return Learned.load(path)


def _path(job: Workload, config: RunConfig) -> Path:
    data, machine = prepared(job.config), job.machine
    length = data.sequence_length if data else config.data.sequence_length
    return learned_path(config, length=length, device=machine.gpu.name, world_size=machine.ranks)


def _as_chosen(job: Workload, choice: Choice) -> RunConfig:
    """Return the configuration of the planned training run, before it is adapted to the device."""
    config, option = job.config, choice.option
    training = config.training.model_copy(
        update={
            "bf16": job.precision == "bf16",
            "fp16": job.precision == "fp16",
            "optim": option.optim,
        }
    )
    model = config.model.model_copy(update={"adapter": choice.setting.adapter})
    return config.model_copy(update={"training": training, "model": model})


def _kind(device: str) -> str:
    gpu = known_gpu(device)
    return gpu.name if gpu else device
