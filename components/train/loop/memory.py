"""The minimum memory that this training run needs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from steadytrain.components.memory.model import ONE_OUTPUT
from steadytrain.components.memory.peak import peak_memory
from steadytrain.components.memory.setting import Setting
from steadytrain.components.memory.shape import shape_of
from steadytrain.components.memory.techniques import with_techniques
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.tasks.base import load_task
from steadytrain.components.train.loop.setup import Parts, precision


def least_memory(parts: Parts) -> int:
    """Return a rank's bytes with micro-batch 1 and activation checkpointing, by the formula.

    Return 0 if the formula does not know the model.
    """
    config: Any = getattr(parts.module, "config", None)
    if config is None:
        return 0
    task = load_task(parts.config.data.task)
    classes = type(parts.module).__name__.endswith("ForSequenceClassification")
    labels = ONE_OUTPUT if task.contrasts else config.num_labels if classes else 0
    share = parts.config.training.global_batch_size // parts.world_size
    try:
        shape = shape_of(config.to_dict(), labels=labels)
        frozen = sum(group.parameters for group in parts.groups if group.unfreeze_at is None)
        shape = replace(shape, frozen=frozen)
        setting = Setting(
            length=parts.sequence_length or shape.positions,
            precision=precision(parts.config),
            recompute=True,
            accumulates=share > 1,
            strategy="ddp" if parts.world_size > 1 else "single",
            ranks=parts.world_size,
            adapter=parts.config.model.adapter,
            optim=parts.config.training.optim,
            cuda=parts.accelerator.device.type == "cuda",
        )
        setting = with_techniques(setting, parts.config, shape, sequences=share)
    except BadInput:
        return 0
    return peak_memory(shape, setting).total
