"""Set up everything a rank needs before its first step."""

from __future__ import annotations

import base64
import os
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, InitProcessGroupKwargs
from torch.optim.lr_scheduler import LRScheduler

from steadytrain.components.memory.groups import Group, frozen_names, grouped
from steadytrain.components.shared.batch import BatchSettings
from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.config.fields import Decision
from steadytrain.components.shared.config.strategies import DISK
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.shared.records import DataRecord
from steadytrain.components.sizing.hardware import check_cuda_fields
from steadytrain.components.sizing.length import of_mixture, steps_of, without_effect
from steadytrain.components.sizing.recipe import learning_rate, recipe_of_run
from steadytrain.components.tasks.base import OpenTask, Packager, TrainingTask, load_task
from steadytrain.components.tasks.frozen_parts import attach, parameter_count
from steadytrain.components.techniques.curriculum.order import SequenceLength
from steadytrain.components.techniques.order import Mixture, Order
from steadytrain.components.train.attempt import MEETING, Heartbeat, longest_wait
from steadytrain.components.train.failures import CannotRecompute
from steadytrain.components.train.loop.control import Watch
from steadytrain.components.train.loop.data import Rows
from steadytrain.components.train.loop.exchange import set_longest_wait
from steadytrain.components.train.loop.kernels import compile_layers, usable
from steadytrain.components.train.loop.optim import OptimizerBuilder, build_scheduler
from steadytrain.components.train.loop.order import run_order, sequences_of
from steadytrain.components.train.loop.shortening import of_shortening
from steadytrain.components.train.loop.teacher_answers import answered
from steadytrain.components.train.loop.usage import Usage
from steadytrain.components.train.strategy.base import Strategy, Timer, apply_strategy
from steadytrain.components.train.strategy.replicated import synchronize


@dataclass(frozen=True)
class PhaseSeconds:
    """Seconds of a step's phases on this rank.

    backward: without waiting for the other ranks' gradients.
    optimizer: of clipping and the update. On a GPU, of the step before: the update of this one is
        not over yet when it is read.
    """

    forward: float = 0.0
    backward: float = 0.0
    optimizer: float = 0.0


class Phases:
    """Times the phases of steps.

    meeting: the wait for the other ranks before a step.
    """

    def __init__(self, device: torch.device) -> None:
        self.meeting, self.forward = Timer(device), Timer(device)
        self.backward, self.optimizer = Timer(device), Timer(device)

    def take(self, exchanged: float) -> PhaseSeconds:
        """Return the seconds of the passes since the last call.

        Call this where the device has finished the backward pass, so that nothing waits for it.

        Args:
            exchanged: seconds of the backward passes in which this rank waited for the others.
        """
        return PhaseSeconds(
            forward=self.forward.take(),
            backward=max(0.0, self.backward.take() - exchanged),
        )


@dataclass
class TrainingSetup:
    """Everything a rank trains with.

    parameters: number of parameters of the full model.
    recipe: decisions that determine what is learned, each with its reason.
    steps: optimizer steps of the full training run.
    sequence_length: longest row in tokens; 0 if the data do not specify it.
    sequences: cuts the documents of early steps; None if nothing does.
    remarks: settings without effect, and what this rank does slower than it could, and why.
    groups: how parameters are trained, if not all alike.
    joined: when the ranks had found each other, in Unix seconds.
    """

    config: RunConfig
    batch: BatchSettings
    accelerator: Accelerator
    task: TrainingTask
    packager: Packager
    strategy: Strategy
    parameters: int
    recipe: Sequence[Decision]
    scheduler: LRScheduler
    train: Rows
    validation: Rows
    order: Order
    steps: int
    skipped_batches: Sequence[int] = ()
    sequence_length: int = 0
    sequences: SequenceLength | None = None
    remarks: Sequence[str] = ()
    groups: Sequence[Group] = ()
    joined: float = 0.0
    heartbeat: Heartbeat | None = None
    usage: Usage | None = None
    phases: Phases = field(init=False)

    def __post_init__(self) -> None:
        self.phases = Phases(self.accelerator.device)

    def beat(self, phase: str, step: int | None = None) -> None:
        """Record a sign of life from the training thread."""
        if self.heartbeat is not None:
            self.heartbeat.beat(phase, step)
        if self.usage is not None:
            self.usage.report()

    def meet(self) -> None:
        """Record a sign of life while this rank waits for the others."""
        self.beat(MEETING)

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


def set_up(
    config: RunConfig,
    data: DataRecord,
    batch: BatchSettings,
    *,
    skipped_batches: Sequence[int] = (),
    recipe: Sequence[Decision] = (),
    watch: Watch = Watch(),  # noqa: B008  immutable
) -> TrainingSetup:
    """Build this rank's model, optimizer, schedule and data.

    Args:
        batch: overrides the configuration.
        skipped_batches: global batches to skip, in ascending order.
        recipe: the decisions of an earlier attempt. If empty, they are made here, from the
            configuration and rules.
        watch: what this rank does while another model scores or answers the rows.

    Raises:
        BadInput: device, precision, model or data do not work together.
        StoppedEarly: the ranks were asked to stop while that model worked.
        CannotRecompute: the model has no activation checkpointing, and the configuration does not
            ask for it.
    """
    accelerator = make_accelerator(config, offload=batch.offload)
    joined = time.time()
    tried = usable(config, accelerator)
    config = tried.config
    training = config.training
    if training.full_determinism:
        make_deterministic()
    opened = OpenTask(config, data)
    task = opened.training
    rows = Rows.of(data, "train")
    if training.augmentation.on:
        rows.check_texts()
    side = data.sides["train"]
    steps = steps_of(training, side)
    order = run_order(config, data, rows, task, accelerator, watch, steps=steps)
    module = build_module(config, task)
    groups = grouped(module, training)
    remarks = [
        *without_effect(training, len(rows), steps),
        *of_mixture(training, side, steps),
        *(order.undrawn(steps * training.global_batch_size) if isinstance(order, Mixture) else ()),
        *tried.remarks,
        *(task.ready(module) if hasattr(task, "ready") else ()),
        *of_shortening(
            rows,
            batch.sequence_length,
            data.sequence_length,
            cuttable=load_task(data.task).cuttable,
        ),
        *(synchronize(module, accelerator.device) if accelerator.num_processes > 1 else ()),
    ]
    if training.distillation.stored:
        # Before the student is on the device: the two never share its memory.
        rows.extra = answered(config, data, rows, task, module, accelerator, watch)
    parameters = parameter_count(module)
    recipe = recipe or recipe_of_run(config, parameters)
    training = training.model_copy(update={"learning_rate": learning_rate(recipe)})
    if batch.offload == DISK:
        watch.warn(
            "compute.offload = disk reads and writes its files with DeepSpeed's async_io: a "
            "machine that has not compiled it yet does so now, which takes minutes"
        )
    applied = make_ready(
        config.model_copy(update={"training": training}),
        accelerator,
        module,
        batch,
        fused=tried.fused,
    )
    return TrainingSetup(
        config=config,
        batch=batch,
        accelerator=accelerator,
        task=task,
        packager=opened.packager,
        strategy=applied,
        parameters=parameters,
        recipe=recipe,
        scheduler=build_scheduler(applied.optimizer, training, steps),
        train=rows,
        validation=Rows.of(data, "validation"),
        order=order,
        steps=steps,
        skipped_batches=skipped_batches,
        sequence_length=data.sequence_length,
        sequences=sequences_of(config, data, steps=steps),
        remarks=remarks,
        groups=groups,
        joined=joined,
    )


def build_module(config: RunConfig, task: TrainingTask) -> torch.nn.Module:
    """Build the model to train in host memory, identical on all ranks.

    Raises:
        BadInput: the model does not work with the data, with adapters, or with
            `training.param_groups`.
    """
    seed_everything(config.training.seed)
    module = task.build_model()
    if config.model.adapter.freezes:
        module = attach(module, config.model.adapter)
    else:
        named = dict(module.named_parameters())
        for name in frozen_names(module, config.training):
            named[name].requires_grad_(False)
    if hasattr(task, "extend"):
        task.extend(module)
    return module


def make_ready(
    config: RunConfig,
    accelerator: Accelerator,
    module: torch.nn.Module,
    batch: BatchSettings,
    *,
    fused: bool = True,
) -> Strategy:
    """Put the model on its device and create its optimizer, ready for steps.

    Args:
        batch: as for `set_up`.
        fused: whether the optimizer's fused update works here.

    Raises:
        BadInput, CannotRecompute: as for `set_up`.
    """
    training = config.training
    if batch.gradient_checkpointing:
        recompute_activations(module, configured=training.gradient_checkpointing)
    if training.torch_compile:
        compile_layers(module)
    # Each rank gets different dropout.
    seed_everything(training.seed + int(accelerator.process_index))
    return apply_strategy(
        config,
        accelerator,
        module,
        OptimizerBuilder(training, scaled=accelerator.scaler is not None or not fused),
        strategy=batch.strategy,
        offload=batch.offload,
    )


def make_accelerator(config: RunConfig, *, offload: str = "none") -> Accelerator:
    """Set up device, precision and process group.

    Raises:
        BadInput: the device does not exist, or it does not support the precision.
    """
    training, wanted = config.training, config.compute.device
    cuda = wanted != "cpu" and torch.cuda.is_available()
    if wanted == "cuda" and not cuda:
        raise BadInput(
            "compute.device = 'cuda': PyTorch finds no CUDA device here",
            remedy="set compute.device to auto or cpu, or fix the driver",
        )
    if offload not in ("none", DISK) and not cuda:
        raise BadInput(
            f"compute.offload = {offload!r}: there is no GPU to offload from",
            remedy="leave it out",
        )
    if not cuda:
        check_cuda_fields(config)
    if training.bf16 and cuda and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise BadInput(
            f"training.bf16 = true: {torch.cuda.get_device_name()} has no bfloat16",
            remedy="set training.fp16 instead",
        )
    seconds = longest_wait(config.recovery)
    set_longest_wait(seconds)
    handlers: list[Any] = [
        # A parameter without a gradient must not stop a rank. Without this option, DDP also
        # rearranges its buckets after the first step, and a resumed run on more than two ranks
        # would sum gradients in a different order.
        DistributedDataParallelKwargs(find_unused_parameters=True, gradient_as_bucket_view=True)
    ]
    # With offload, ranks also reduce tensors in host memory.
    both = {"backend": "cuda:nccl,cpu:gloo"} if offload != "none" and cuda else {}
    handlers.append(InitProcessGroupKwargs(timeout=timedelta(seconds=seconds), **both))
    return Accelerator(
        cpu=not cuda,
        mixed_precision="no" if training.precision == "fp32" else training.precision,
        kwargs_handlers=handlers,
    )


def recompute_activations(module: Any, *, configured: bool) -> None:
    """Keep only each layer's input, and recompute its activations in the backward pass.

    Args:
        configured: whether the user's configuration asks for it.

    Raises:
        BadInput: the user asked for it, but the model does not support it.
        CannotRecompute: the user did not ask for it, and the model does not support it.
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


def seed_everything(seed: int) -> None:
    """Seed Python, NumPy and PyTorch on all devices."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def make_deterministic() -> None:
    """Allow only deterministic kernels. An operation without one raises an error."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False


def random_state() -> dict[str, Any]:
    """Return the state of every random generator of this process, as plain JSON data."""
    numpy_state: Any = np.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": [numpy_state[0], numpy_state[1].tolist(), *numpy_state[2:]],
        "torch": _encode(torch.get_rng_state()),
        "cuda": _encode(torch.cuda.get_rng_state()) if torch.cuda.is_available() else None,
    }


def restore_random_state(state: dict[str, Any]) -> None:
    """Restore the result of `random_state`, on the current device."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, *others = state["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *others))
    torch.set_rng_state(_decode(state["torch"]))
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(_decode(state["cuda"]))


def _encode(state: torch.Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _decode(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
