"""The supervised contrastive loss of a micro-batch: rows of one class should have similar states.

From Khosla et al. 2020, "Supervised Contrastive Learning", equation 2; for fine-tuning encoders:
Gunel et al. 2021. All of it is in 32 bits.
"""

from __future__ import annotations

import torch
from torch.nn import functional


def pooled(states: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the mean state of each row's tokens, (rows, width), float32.

    Args:
        states: (rows, length, width).
        mask: (rows, length), 1 for tokens and 0 for padding.
    """
    kept = mask.unsqueeze(2).float()
    return (states.float() * kept).sum(1) / kept.sum(1).clamp_min(1)


def supervised_contrastive_loss(
    rows: torch.Tensor, labels: torch.Tensor, temperature: float
) -> torch.Tensor:
    """Return the loss summed over the rows. A row that is alone in its class has none.

    Args:
        rows: (rows, width), float32, of any length.
        labels: (rows), int64.
    """
    with torch.autocast(rows.device.type, enabled=False):
        directions = functional.normalize(rows, dim=1)
        similar = directions @ directions.T / temperature
    itself = torch.eye(len(rows), dtype=torch.bool, device=rows.device)
    chances = similar.masked_fill(itself, -torch.inf).logsumexp(1, keepdim=True)
    positive = (labels.unsqueeze(0) == labels.unsqueeze(1)) & ~itself
    counts = positive.sum(1)
    # One row has no other row, and its sum over none is minus infinity.
    each = torch.where(positive, chances - similar, 0.0).sum(1) / counts.clamp_min(1)
    return each.sum()
