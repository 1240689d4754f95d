"""What a rank needs before its first step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs
from torch.optim.lr_scheduler import LRScheduler

from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.shared.records import DataRecord, Side
from steadytrain.components.tasks.base import Task
from steadytrain.components.tasks.registry import open_task
from steadytrain.components.train.heartbeat import Heartbeat
from steadytrain.components.train.loop.data import RowOrder, Rows
from steadytrain.components.train.loop.errors import CannotRecompute
from steadytrain.components.train.loop.optim import build_optimizer, build_scheduler, total_steps
from steadytrain.components.train.loop.seeds import make_deterministic, seed_everything
from steadytrain.components.train.plan.setting import Precision


@dataclass
class Parts:
    """A rank's working parts.

    module: the task's own model; `model` is the same, wrapped for this world.
    steps: optimizer steps of the whole training.
    sequence_length: longest row in tokens; 0 where the data do not say.
    """

    config: RunConfig
    micro_batch_size: int
    accelerator: Accelerator
    task: Task
    module: torch.nn.Module
    model: torch.nn.Module
    optimizer: Any
    scheduler: LRScheduler
    train: Rows
    validation: Rows
    order: RowOrder
    steps: int
    skipped_batches: Sequence[int] = ()
    sequence_length: int = 0
    heartbeat: Heartbeat | None = None

    def beat(self, phase: str, step: int | None = None) -> None:
        """A sign of life from the thread that trains."""
        if self.heartbeat is not None:
            self.heartbeat.beat(phase, step)

    @property
    def rank(self) -> int:
        return int(self.accelerator.process_index)

    @property
    def world_size(self) -> int:
        return int(self.accelerator.num_processes)

    @property
    def parameters(self) -> int:
        return sum(item.numel() for item in self.module.parameters())

    def to_device(self, batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        device = self.accelerator.device
        return {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}


def set_up(
    config: RunConfig,
    data: DataRecord,
    micro_batch_size: int,
    *,
    gradient_checkpointing: bool = False,
    skipped_batches: Sequence[int] = (),
) -> Parts:
    """Builds model, optimizer, schedule and data of this rank.

    Args:
        gradient_checkpointing: whether activations are recomputed, whatever the configuration says.
        skipped_batches: global batches that are left out, ascending.

    Raises:
        BadInput: device, precision, model or data cannot be used together.
        CannotRecompute: the model has no activation checkpointing, and nobody configured it.
    """
    training = config.training
    accelerator = make_accelerator(config, gradient_checkpointing=gradient_checkpointing)
    if training.full_determinism:
        make_deterministic()
    # Equal on all ranks, so that all build the same model.
    seed_everything(training.seed)
    task = open_task(config, data)
    rows = _rows(data, "train")
    order = RowOrder(len(rows), training.seed)
    module = task.build_model()
    if gradient_checkpointing:
        _recompute_activations(module, configured=training.gradient_checkpointing)
    # Each rank draws its own dropout.
    seed_everything(training.seed + int(accelerator.process_index))
    # The optimizer is made from the model on its device.
    model = accelerator.prepare(module)
    optimizer = build_optimizer(module, training)
    steps = total_steps(training, len(rows))
    return Parts(
        config=config,
        micro_batch_size=micro_batch_size,
        accelerator=accelerator,
        task=task,
        module=module,
        model=model,
        optimizer=accelerator.prepare(optimizer),
        scheduler=build_scheduler(optimizer, training, steps),
        train=rows,
        validation=_rows(data, "validation"),
        order=order,
        steps=steps,
        skipped_batches=skipped_batches,
        sequence_length=data.sequence_length,
    )


def make_accelerator(config: RunConfig, *, gradient_checkpointing: bool = False) -> Accelerator:
    """Device, precision and process group.

    Raises:
        BadInput: there is no such device, or it lacks the precision.
    """
    training, wanted = config.training, config.compute.device
    cuda = wanted != "cpu" and torch.cuda.is_available()
    if wanted == "cuda" and not cuda:
        raise BadInput(
            "compute.device = 'cuda': PyTorch finds no CUDA device here",
            remedy="set compute.device to auto or cpu, or mend the driver",
        )
    if training.fp16 and not cuda:
        raise BadInput(
            "training.fp16 = true: float16 needs a CUDA device",
            remedy="set training.bf16 instead, or neither",
        )
    if training.bf16 and cuda and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise BadInput(
            f"training.bf16 = true: {torch.cuda.get_device_name()} has no bfloat16",
            remedy="set training.fp16 instead",
        )
    return Accelerator(
        cpu=not cuda,
        mixed_precision=precision(config) if training.bf16 or training.fp16 else "no",
        kwargs_handlers=[
            # As Trainer decides it: a parameter without a gradient must not stop a rank.
            DistributedDataParallelKwargs(
                find_unused_parameters=not gradient_checkpointing,
                gradient_as_bucket_view=True,
            )
        ],
    )


def precision(config: RunConfig) -> Precision:
    """Name of the precision of forward and backward passes."""
    training = config.training
    return "bf16" if training.bf16 else "fp16" if training.fp16 else "fp32"


def _rows(data: DataRecord, side: Side) -> Rows:
    return Rows([data.path(name) for name in data.sides[side].shards])


def _recompute_activations(module: Any, *, configured: bool) -> None:
    if not getattr(module, "supports_gradient_checkpointing", False):
        name = type(module).__name__
        if not configured:
            raise CannotRecompute(f"{name} has no activation checkpointing")
        raise BadInput(
            f"training.gradient_checkpointing = true: {name} cannot do that",
            remedy="set it to false",
        )
    module.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
