"""How training itself can fail. The supervisor classes a failure by the error's name."""

from __future__ import annotations

import math
from typing import Any

from steadytrain.components.shared.errors import SteadytrainError


class Diverged(SteadytrainError):
    """Loss or gradient norm is not finite, or the loss is far above those before it.

    limit: the highest loss that would have been normal, where it has spiked.
    """

    def __init__(
        self, step: int, loss: float, grad_norm: float, *, limit: float | None = None
    ) -> None:
        spiked = "" if limit is None else f" (a spike: above {limit:.4g})"
        super().__init__(
            f"training diverged at step {step}: loss {loss}{spiked}, gradient norm {grad_norm}",
            remedy="lower training.learning_rate, lengthen training.warmup_steps, or look for "
            "defective records",
        )
        self.step, self.loss = step, loss


class NonFiniteState(Diverged):
    """A weight or a value of the optimizer is not finite, though loss and gradient were.

    step: after which it was found.
    """

    def __init__(self, step: int, tensor: str) -> None:
        SteadytrainError.__init__(
            self,
            f"training diverged at step {step}: {tensor} holds a value that is not finite, and "
            "no checkpoint was made of it",
            remedy="lower training.learning_rate, or look for defective records",
        )
        self.step, self.loss, self.tensor = step, math.nan, tensor

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.step, self.tensor)


class CannotRecompute(SteadytrainError):
    """The memory is too small, and the model has no activation checkpointing to make it do."""
