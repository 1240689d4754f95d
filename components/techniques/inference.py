"""Run a model without training it: in evaluation mode, on micro-batches on its device."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from steadytrain.components.techniques.base import Batch


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Return the batch with its tensors on the device. Other values stay the same."""
    return {
        name: value.to(device, non_blocking=True) if isinstance(value, torch.Tensor) else value
        for name, value in batch.items()
    }


@contextlib.contextmanager
def eval_mode(model: torch.nn.Module) -> Iterator[None]:
    """Within this context, the model runs without dropout and gradients.

    Afterward, its mode is the same as before.
    """
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(training)
