"""What a rank needs before its first step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, InitProcessGroupKwargs
from torch.optim.lr_scheduler import LRScheduler

from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.decision import Decision
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.shared.records import DataRecord, Side
from steadytrain.components.tasks.base import Task
from steadytrain.components.tasks.registry import open_task
from steadytrain.components.train.heartbeat import Heartbeat
from steadytrain.components.train.loop.adapter import attach
from steadytrain.components.train.loop.data import Rows
from steadytrain.components.train.loop.errors import CannotRecompute
from steadytrain.components.train.loop.optim import build_optimizer, build_scheduler, total_steps
from steadytrain.components.train.loop.order import RowOrder, order_of
from steadytrain.components.train.loop.seeds import make_deterministic, seed_everything
from steadytrain.components.train.plan.batch import REPLICATED
from steadytrain.components.train.plan.device import refuse_what_needs_cuda
from steadytrain.components.train.plan.recipe import learning_rate, recipe_of_run
from steadytrain.components.train.plan.setting import Precision
from steadytrain.components.train.strategy.base import Strategy
from steadytrain.components.train.strategy.choose import apply_strategy


@dataclass
class Parts:
    """A rank's working parts.

    parameters: of the whole model.
    recipe: what decides what is learned, each with its reason.
    steps: optimizer steps of the whole training.
    sequence_length: longest row in tokens; 0 where the data do not say.
    remarks: what the task does slower than it could, and why.
    """

    config: RunConfig
    micro_batch_size: int
    accelerator: Accelerator
    task: Task
    strategy: Strategy
    parameters: int
    recipe: Sequence[Decision]
    scheduler: LRScheduler
    train: Rows
    validation: Rows
    order: RowOrder
    steps: int
    skipped_batches: Sequence[int] = ()
    sequence_length: int = 0
    remarks: Sequence[str] = ()
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
    def module(self) -> torch.nn.Module:
        """The task's own model."""
        return self.strategy.module

    def to_device(self, batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        device = self.accelerator.device
        return {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}


def set_up(
    config: RunConfig,
    data: DataRecord,
    micro_batch_size: int,
    *,
    gradient_checkpointing: bool = False,
    strategy: str = REPLICATED,
    offload: str = "none",
    skipped_batches: Sequence[int] = (),
    recipe: Sequence[Decision] = (),
) -> Parts:
    """Builds model, optimizer, schedule and data of this rank.

    Args:
        gradient_checkpointing: whether activations are recomputed, whatever the configuration says.
        strategy, offload: as in `compute`, whatever the configuration says, but never "auto".
        skipped_batches: global batches that are left out, ascending.
        recipe: as it was decided before; empty: by configuration and rules, here.

    Raises:
        BadInput: device, precision, model or data cannot be used together.
        CannotRecompute: the model has no activation checkpointing, and nobody configured it.
    """
    training = config.training
    accelerator = make_accelerator(
        config, gradient_checkpointing=gradient_checkpointing, offload=offload
    )
    if training.full_determinism:
        make_deterministic()
    task = open_task(config, data)
    rows = _rows(data, "train")
    order = order_of(rows, task, seed=training.seed, batch=training.global_batch_size)
    module = build_module(config, task)
    remarks = task.ready(module) if hasattr(task, "ready") else ()
    parameters = sum(item.numel() for item in module.parameters())
    recipe = recipe or recipe_of_run(config, parameters)
    training = training.model_copy(update={"learning_rate": learning_rate(recipe)})
    applied = make_ready(
        config.model_copy(update={"training": training}),
        accelerator,
        module,
        gradient_checkpointing=gradient_checkpointing,
        strategy=strategy,
        offload=offload,
    )
    steps = total_steps(training, len(rows))
    return Parts(
        config=config,
        micro_batch_size=micro_batch_size,
        accelerator=accelerator,
        task=task,
        strategy=applied,
        parameters=parameters,
        recipe=recipe,
        scheduler=build_scheduler(applied.optimizer, training, steps),
        train=rows,
        validation=_rows(data, "validation"),
        order=order,
        steps=steps,
        skipped_batches=skipped_batches,
        sequence_length=data.sequence_length,
        remarks=remarks,
    )


def build_module(config: RunConfig, task: Task) -> torch.nn.Module:
    """The model to train, alike on all ranks, in the host's memory.

    Raises:
        BadInput: it cannot be used with the data, or with adapters.
    """
    seed_everything(config.training.seed)
    module = task.build_model()
    return attach(module, config.model.adapter) if config.model.adapter.freezes else module


def make_ready(
    config: RunConfig,
    accelerator: Accelerator,
    module: torch.nn.Module,
    *,
    gradient_checkpointing: bool = False,
    strategy: str = REPLICATED,
    offload: str = "none",
) -> Strategy:
    """The model on its device with its optimizer, as steps take it.

    Args:
        gradient_checkpointing, strategy, offload: as for `set_up`.

    Raises:
        BadInput, CannotRecompute: as `set_up` does.
    """
    training = config.training
    if gradient_checkpointing:
        recompute_activations(module, configured=training.gradient_checkpointing)
    if training.torch_compile:
        # In place, so that its tensors keep their names.
        module.compile()
    # Each rank draws its own dropout.
    seed_everything(training.seed + int(accelerator.process_index))
    return apply_strategy(
        config,
        accelerator,
        module,
        lambda model: build_optimizer(model, training),
        strategy=strategy,
        offload=offload,
    )


def make_accelerator(
    config: RunConfig, *, gradient_checkpointing: bool = False, offload: str = "none"
) -> Accelerator:
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
    if offload != "none" and not cuda:
        raise BadInput(
            f"compute.offload = {offload!r}: there is no GPU whose memory it could spare",
            remedy="leave it out",
        )
    if not cuda:
        refuse_what_needs_cuda(config)
    if training.bf16 and cuda and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise BadInput(
            f"training.bf16 = true: {torch.cuda.get_device_name()} has no bfloat16",
            remedy="set training.fp16 instead",
        )
    handlers: list[Any] = [
        # As Trainer decides it: a parameter without a gradient must not stop a rank.
        DistributedDataParallelKwargs(
            find_unused_parameters=not gradient_checkpointing,
            gradient_as_bucket_view=True,
        )
    ]
    if offload == "all":
        # Ranks add up what is in the host's memory too.
        handlers.append(InitProcessGroupKwargs(backend="cuda:nccl,cpu:gloo"))
    return Accelerator(
        cpu=not cuda,
        mixed_precision=precision(config) if training.bf16 or training.fp16 else "no",
        kwargs_handlers=handlers,
    )


def precision(config: RunConfig) -> Precision:
    """Name of the precision of forward and backward passes."""
    training = config.training
    return "bf16" if training.bf16 else "fp16" if training.fp16 else "fp32"


def _rows(data: DataRecord, side: Side) -> Rows:
    return Rows([data.path(name) for name in data.sides[side].shards])


def recompute_activations(module: Any, *, configured: bool) -> None:
    """Keeps of each layer its input alone.

    Args:
        configured: whether the user has asked for it.

    Raises:
        BadInput: it cannot do that, as configured.
        CannotRecompute: it cannot do that.
    """
    if not getattr(module, "supports_gradient_checkpointing", False):
        name = type(module).__name__
        if not configured:
            raise CannotRecompute(f"{name} has no activation checkpointing")
        raise BadInput(
            f"training.gradient_checkpointing = true: {name} cannot do that",
            remedy="set it to false",
        )
    module.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
