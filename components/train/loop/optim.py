"""The optimizer and learning-rate schedule of a run, from the specs that it names."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from steadytrain.components.shared import plugins
from steadytrain.components.shared.config import TrainingConfig
from steadytrain.components.shared.config.optimizers import OptimizerSpec, optimizer_spec
from steadytrain.components.shared.config.schedules import Course, ScheduleSpec, schedule_spec
from steadytrain.components.shared.errors import BadInput

_WITHOUT_DECAY = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")


def total_steps(training: TrainingConfig, rows: int) -> int:
    """Return the number of optimizer steps of the full training run."""
    if training.max_steps > 0:
        return training.max_steps
    return math.ceil(training.num_train_epochs * rows / training.global_batch_size)


@dataclass(frozen=True)
class OptimizerBuilder:
    """Builds the configured optimizer for a model in its final form on a rank.

    scaled: whether a loss scaler skips steps that overflow.
    """

    training: TrainingConfig
    scaled: bool = False

    @property
    def spec(self) -> OptimizerSpec:
        return optimizer_spec(self.training.optim)

    def __call__(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        groups = parameter_groups(model, self.training.weight_decay)
        made: torch.optim.Optimizer = self.spec.build(groups, self.training, scaled=self.scaled)
        return made


def parameter_groups(model: torch.nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return the trained parameters in groups. Biases and norms have no weight decay."""
    norms = {
        item
        for layer in model.modules()
        if isinstance(layer, torch.nn.LayerNorm)
        for item in layer.parameters()
    }
    named = [(name, item) for name, item in model.named_parameters() if item.requires_grad]
    decaying = [
        item
        for name, item in named
        if item not in norms and not _WITHOUT_DECAY.search(name.lower())
    ]
    kept = set(decaying)
    groups = [
        {"params": decaying, "weight_decay": weight_decay},
        {"params": [item for _, item in named if item not in kept], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def build_scheduler(
    optimizer: torch.optim.Optimizer, training: TrainingConfig, steps: int
) -> LRScheduler:
    """Build the schedule over `steps` optimizer steps. A warm-up below 1 is a fraction of them.

    Raises:
        BadInput: the peak rate is not above the schedule's last one, or the schedule rejects its
            options.
    """
    kind, warmup = training.lr_scheduler_type, training.warmup_steps
    spec, peak = schedule_spec(kind), float(optimizer.defaults["lr"])
    if peak <= spec.last_rate:
        raise BadInput(
            f"training.learning_rate = {peak}: training.lr_scheduler_type {kind} ends with "
            f"{spec.last_rate}",
            remedy="use a higher one, or another training.lr_scheduler_type",
        )
    whole = int(warmup) if warmup >= 1 else math.ceil(steps * warmup)
    options = plugins.call(spec.options, training.lr_scheduler_kwargs, kind)
    course = Course(steps, whole if spec.warms_up else 0, peak, options)
    return LambdaLR(optimizer, partial(_factor, kind=kind, spec=spec, course=course))


def _factor(step: int, *, kind: str, spec: ScheduleSpec, course: Course) -> float:
    """Return the factor for the peak rate.

    Raises:
        BadInput: the schedule's factor is negative or not finite.
    """
    if step < course.warmup:
        return step / course.warmup
    factor = spec.factor(step, course)
    if not (math.isfinite(factor) and factor >= 0):
        raise BadInput(
            f"training.lr_scheduler_type = {kind!r}: its factor at step {step} is {factor}",
            remedy="fix the schedule: its factor must be finite and not negative",
        )
    return factor


def set_rate(scheduler: LRScheduler, rate: float) -> None:
    """Make `rate` the schedule's base rate, without changing the schedule's current step."""
    groups = scheduler.optimizer.param_groups
    for group, base in zip(groups, scheduler.base_lrs, strict=True):
        group["lr"] = float(group["lr"]) * (rate / base)
        group["initial_lr"] = rate
    scheduler.base_lrs = [rate] * len(groups)
    scheduler._last_lr = [group["lr"] for group in groups]
