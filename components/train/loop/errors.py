"""How training itself can fail. The supervisor classes a failure by the error's name."""

from __future__ import annotations

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


class CannotRecompute(SteadytrainError):
    """The memory is too small, and the model has no activation checkpointing to make it do."""
