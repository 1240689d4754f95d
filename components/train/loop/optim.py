"""Optimizer and learning-rate schedule, as Transformers' Trainer makes them."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler
from transformers.optimization import get_scheduler
from transformers.trainer_pt_utils import get_parameter_names

from steadytrain.components.shared.config import TrainingConfig

_EIGHT_BITS = {"adamw_bnb_8bit": "AdamW8bit", "paged_adamw_8bit": "PagedAdamW8bit"}
_WITHOUT_DECAY = [r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)"]


def total_steps(training: TrainingConfig, rows: int) -> int:
    """Optimizer steps of the whole training."""
    if training.max_steps > 0:
        return training.max_steps
    return math.ceil(training.num_train_epochs * rows / training.global_batch_size)


def build_optimizer(model: torch.nn.Module, training: TrainingConfig) -> torch.optim.Optimizer:
    """AdamW, its moments in 32 or in 8 bits; biases and norms do not decay."""
    decaying = set(get_parameter_names(model, [torch.nn.LayerNorm], _WITHOUT_DECAY))
    named = [(name, item) for name, item in model.named_parameters() if item.requires_grad]
    groups = [
        {
            "params": [item for name, item in named if name in decaying],
            "weight_decay": training.weight_decay,
        },
        {"params": [item for name, item in named if name not in decaying], "weight_decay": 0.0},
    ]
    made: torch.optim.Optimizer = _kind(training.optim)(
        [group for group in groups if group["params"]],
        lr=training.learning_rate,
        betas=(training.adam_beta1, training.adam_beta2),
        eps=training.adam_epsilon,
    )
    return made


def _kind(name: str) -> Any:
    if name == "adamw_torch":
        return torch.optim.AdamW
    import bitsandbytes.optim

    return getattr(bitsandbytes.optim, _EIGHT_BITS[name])


def build_scheduler(
    optimizer: torch.optim.Optimizer, training: TrainingConfig, steps: int
) -> LRScheduler:
    """The schedule over `steps` optimizer steps; a warm-up below 1 is a share of them."""
    warmup = training.warmup_steps
    scheduler: LRScheduler = get_scheduler(
        training.lr_scheduler_type,
        optimizer,
        num_warmup_steps=int(warmup) if warmup >= 1 else math.ceil(steps * warmup),
        num_training_steps=steps,
    )
    return scheduler


def set_rate(scheduler: LRScheduler, rate: float) -> None:
    """Makes `rate` the schedule's base rate, at the step where the schedule is."""
    groups = scheduler.optimizer.param_groups
    for group, base in zip(groups, scheduler.base_lrs, strict=True):
        group["lr"] = float(group["lr"]) * (rate / base)
        group["initial_lr"] = rate
    scheduler.base_lrs = [rate] * len(groups)
    scheduler._last_lr = [group["lr"] for group in groups]
