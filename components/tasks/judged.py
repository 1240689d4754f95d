"""A model that is asked something before it is trained."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def judged(model: torch.nn.Module) -> Iterator[None]:
    """Within, the model runs without dropout and gradients; afterwards its mode is as before."""
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(training)
