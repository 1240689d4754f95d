"""The optimizer and learning-rate schedule, equal to those of Transformers' Trainer."""

from __future__ import annotations

import math
import re
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from steadytrain.components.shared.config import TrainingConfig
from steadytrain.components.train.loop.schedules import make_schedule

_EIGHT_BITS = {"adamw_bnb_8bit": "AdamW8bit", "paged_adamw_8bit": "PagedAdamW8bit"}
_WITHOUT_DECAY = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")


def total_steps(training: TrainingConfig, rows: int) -> int:
    """Return the number of optimizer steps of the full training run."""
    if training.max_steps > 0:
        return training.max_steps
    return math.ceil(training.num_train_epochs * rows / training.global_batch_size)


def build_optimizer(
    model: torch.nn.Module, training: TrainingConfig, *, scaled: bool = False
) -> torch.optim.Optimizer:
    """Build AdamW with 32-bit or 8-bit moments. Biases and norms have no weight decay.

    Args:
        scaled: whether a loss scaler skips steps that overflow.
    """
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
        {"params": decaying, "weight_decay": training.weight_decay},
        {"params": [item for _, item in named if item not in kept], "weight_decay": 0.0},
    ]
    # A fused update needs a quarter of the time and no extra memory. With a scaler, it would skip
    # steps inside its kernel, where nothing reports them.
    fused = {"fused": not scaled} if training.optim == "adamw_torch" else {}
    made: torch.optim.Optimizer = _kind(training.optim)(
        [group for group in groups if group["params"]],
        lr=training.learning_rate,
        betas=(training.adam_beta1, training.adam_beta2),
        eps=training.adam_epsilon,
        **fused,
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
    """Build the schedule over `steps` optimizer steps. A warm-up below 1 is a fraction of them."""
    warmup = training.warmup_steps
    whole = int(warmup) if warmup >= 1 else math.ceil(steps * warmup)
    return make_schedule(training.lr_scheduler_type, optimizer, whole, steps)


def set_rate(scheduler: LRScheduler, rate: float) -> None:
    """Make `rate` the schedule's base rate, without changing the schedule's current step."""
    groups = scheduler.optimizer.param_groups
    for group, base in zip(groups, scheduler.base_lrs, strict=True):
        group["lr"] = float(group["lr"]) * (rate / base)
        group["initial_lr"] = rate
    scheduler.base_lrs = [rate] * len(groups)
    scheduler._last_lr = [group["lr"] for group in groups]
