"""Request the loss from a model's head, instead of logits: see fused_head.py.

This is a separate module because fused_head.py keeps heads out of compiled graphs, and the import
for that takes seconds.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

import torch


class LossRequest:
    """A request for a loss.

    targets: (rows, length), int64. smoothing: share of each target that is spread over all classes.
    loss: the head's answer. None means that the model has no such head.
    """

    def __init__(self, targets: torch.Tensor, smoothing: float) -> None:
        self.targets = targets
        self.smoothing = smoothing
        self.loss: torch.Tensor | None = None


_request: ContextVar[LossRequest | None] = ContextVar("_request", default=None)


@contextlib.contextmanager
def request_loss(targets: torch.Tensor, smoothing: float = 0.0) -> Iterator[LossRequest]:
    """Within this context, a fused head returns the summed loss instead of logits."""
    request = LossRequest(targets, smoothing)
    token = _request.set(request)
    try:
        yield request
    finally:
        _request.reset(token)


def requested_loss() -> LossRequest | None:
    """Return the current request to the head. None means that logits are wanted."""
    return _request.get()
