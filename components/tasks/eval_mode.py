"""Run a model temporarily in evaluation mode."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


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
