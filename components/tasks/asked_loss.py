"""Request the loss from a model's head, instead of logits: see fused_head.py.

This is a separate module because fused_head.py keeps heads out of compiled graphs, and the import
for that takes seconds.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

import torch


class Asked:
    """A request for a loss.

    targets: (rows, length), int64. smoothing: share of each target that is spread over all classes.
    loss: the head's answer. None means that the model has no such head.
    """

    def __init__(self, targets: torch.Tensor, smoothing: float) -> None:
        self.targets = targets
        self.smoothing = smoothing
        self.loss: torch.Tensor | None = None


_asked: ContextVar[Asked | None] = ContextVar("_asked", default=None)


@contextlib.contextmanager
def asking(targets: torch.Tensor, smoothing: float = 0.0) -> Iterator[Asked]:
    """Within this context, a fused head returns the summed loss instead of logits."""
    asked = Asked(targets, smoothing)
    token = _asked.set(asked)
    try:
        yield asked
    finally:
        _asked.reset(token)


def asked_loss() -> Asked | None:
    """Return the current request to the head. None means that logits are wanted."""
    return _asked.get()
