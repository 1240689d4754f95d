"""Learning-rate schedules, bit for bit equal to those of Transformers' Trainer.

Importing the Trainer's own module also imports PEFT and bitsandbytes, which adds 1.4 s to each
start.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Final

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from steadytrain.components.shared.errors import BadInput

_LAST_RATE: Final = 1e-7
"""Final rate of a polynomial schedule. Its power is 1."""


def make_schedule(kind: str, optimizer: Optimizer, warmup: int, steps: int) -> LRScheduler:
    """Return a schedule over `steps` optimizer steps. The first `warmup` of them rise linearly.

    Raises:
        BadInput: the peak rate is not above the final rate of a polynomial schedule.
    """
    peak = float(optimizer.defaults["lr"])
    if kind == "polynomial" and peak <= _LAST_RATE:
        raise BadInput(
            f"training.learning_rate = {peak}: a polynomial schedule ends with {_LAST_RATE}",
            remedy="use a higher one, or another training.lr_scheduler_type",
        )
    if kind == "constant":
        warmup = 0
    factor = partial(_factor, kind=kind, warmup=warmup, steps=steps, peak=peak)
    return LambdaLR(optimizer, factor)


def _factor(step: int, *, kind: str, warmup: int, steps: int, peak: float) -> float:
    """Return the factor for the peak rate."""
    if step < warmup:
        return step / max(1, warmup)
    length = max(1, steps - warmup)
    if kind == "linear":
        return max(0.0, (steps - step) / length)
    if kind == "cosine":
        return max(0.0, 0.5 * (1.0 + math.cos(math.pi * ((step - warmup) / length))))
    if kind == "polynomial":
        left = max(0.0, 1 - (step - warmup) / length)
        return ((peak - _LAST_RATE) * left + _LAST_RATE) / peak
    return 1.0
