"""Move micro-batches to a device."""

from __future__ import annotations

import torch

from steadytrain.components.tasks.base import Batch


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Return the batch with its tensors on the device. Other values stay the same."""
    return {
        name: value.to(device, non_blocking=True) if isinstance(value, torch.Tensor) else value
        for name, value in batch.items()
    }
