"""Errors that training raises. The supervisor classifies a failure by the error's class name."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from steadytrain.components.shared.errors import SteadytrainError


class Diverged(SteadytrainError):
    """The loss or gradient norm is not finite, or the loss spiked far above the recent losses.

    limit: the highest loss that would still be normal, if the loss spiked; None otherwise.
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
    """A weight or an optimizer value is not finite, although loss and gradients were.

    step: the step after which it was found.
    """

    def __init__(self, step: int, tensor: str) -> None:
        SteadytrainError.__init__(
            self,
            f"training diverged at step {step}: {tensor} contains a value that is not finite, "
            "and it was not saved",
            remedy="lower training.learning_rate, or look for defective records",
        )
        self.step, self.loss, self.tensor = step, math.nan, tensor

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.step, self.tensor)


class CannotRecompute(SteadytrainError):
    """Memory is too small, and the model does not support activation checkpointing."""


class CompiledCodeDamaged(SteadytrainError):
    """Code that an earlier attempt compiled is damaged."""

    def __init__(self, folder: Path, error: BaseException) -> None:
        super().__init__(
            f"{folder}: compiled code of an earlier attempt is damaged and was removed: "
            f"{type(error).__name__}: {error}",
            remedy="start the run again; it compiles the code again",
        )
