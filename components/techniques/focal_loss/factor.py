"""What a target weighs: the less, the better the model already predicts it.

From Lin et al. 2017, "Focal Loss for Dense Object Detection".
"""

from __future__ import annotations

import torch
from torch.nn import functional

_LEAST = 1e-12
"""Least 1 - probability of a target: a power below 1 has no slope at 0."""


def focal_factor(logits: torch.Tensor, targets: torch.Tensor, gamma: float) -> torch.Tensor:
    """Return the factor of each row's loss.

    Args:
        logits: (rows, classes), float32.
        targets: (rows), int64.
    """
    logs = -functional.cross_entropy(logits, targets, reduction="none")
    return (-torch.expm1(logs)).clamp_min(_LEAST) ** gamma
