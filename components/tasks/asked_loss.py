"""How a model's head is asked for the loss in place of logits: see fused_head.py.

Apart from it, since what keeps a head out of compiled graphs takes seconds to import.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

import torch


class Asked:
    """A loss that a head is asked for.

    targets: (rows, length), int64. loss: the head's answer; None: the model has no such head.
    """

    def __init__(self, targets: torch.Tensor) -> None:
        self.targets = targets
        self.loss: torch.Tensor | None = None


_asked: ContextVar[Asked | None] = ContextVar("_asked", default=None)


@contextlib.contextmanager
def asking(targets: torch.Tensor) -> Iterator[Asked]:
    """Within, a fused head gives the summed loss in place of logits."""
    asked = Asked(targets)
    token = _asked.set(asked)
    try:
        yield asked
    finally:
        _asked.reset(token)


def asked_loss() -> Asked | None:
    """What a head is asked for at this moment; None: logits."""
    return _asked.get()
