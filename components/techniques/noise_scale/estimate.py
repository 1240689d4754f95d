"""The gradient noise scale, from the gradients of micro-batches and of the complete global batch.

McCandlish et al., An Empirical Model of Large-Batch Training (2018), appendix A.1: the squared norm
of a gradient over a batch of size B has the expectation |G|^2 + tr(S) / B, where G is the true
gradient and S the covariance of single examples' gradients. Two batch sizes give both unknowns. The
simple noise scale tr(S) / |G|^2 estimates the critical batch size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

import torch

from steadytrain.components.shared.events.types import NoiseScaleMeasured, Warned
from steadytrain.components.techniques.base import (
    Batch,
    TrainingComponent,
    TrainingContext,
    Update,
)

DECAY: Final = 0.98
"""Share of the earlier measurements in their average. Each one alone is noisy."""


@dataclass
class NoiseEstimate:
    """Running averages of the noise and the signal in the gradient of a global batch.

    Their ratio estimates the noise scale in global batches. Both start at 0, and the ratio is free
    of that bias, because it is the same in both.

    noise: tr(S) / B, for a global batch of size B.
    signal: |G|^2.
    """

    noise: float = 0.0
    signal: float = 0.0

    def add(self, micro_batches: int, mean_square: float, square: float) -> None:
        """Add the measurement of one step.

        Args:
            micro_batches: number of micro-batches in the global batch, at least 2.
            mean_square: squared norm of a micro-batch's mean gradient, averaged over the
                micro-batches with their sizes as weights. Its expectation is that of the noise in a
                batch of size B / micro_batches.
            square: squared norm of the global batch's mean gradient.
        """
        noise = (mean_square - square) / (micro_batches - 1)
        self.noise += (1 - DECAY) * (noise - self.noise)
        self.signal += (1 - DECAY) * (square - noise - self.signal)

    @property
    def batches(self) -> float | None:
        """The noise scale in global batches; None if the noise hides the signal so far."""
        return max(0.0, self.noise) / self.signal if self.signal > 0 else None


class NoiseScale(TrainingComponent):
    """Measures every few steps, and changes nothing.

    Hooks see each micro-batch's gradient before it is added to those of the others and before the
    ranks exchange them. So this needs no copy of the gradients.

    Args:
        every: steps between two measurements.
        batch: rows in a global batch.
        targets: returns the number of targets in a micro-batch.
        factor: returns what multiplies the gradients of its loss.
    """

    def __init__(
        self,
        every: int,
        batch: int,
        module: torch.nn.Module,
        accelerator: Any,
        targets: Callable[[Batch], int],
        factor: Callable[[], float],
    ) -> None:
        self.every, self.batch, self.module, self.accelerator = every, batch, module, accelerator
        self.targets, self.factor = targets, factor
        self.estimate = NoiseEstimate()
        self._removers: list[Callable[[], None]] = []
        self._warned = False

    def begin(self, context: TrainingContext) -> None:
        self.context = context
        self._device = self.accelerator.device

    def before_step(self, step: int) -> None:
        if step % self.every:
            return
        # Over micro-batches with t > 0 targets and gradient g: sums of |g|^2 / t, of t, and of 1.
        self._sums = torch.zeros(3, dtype=torch.float64, device=self._device)
        self._square = torch.zeros((), dtype=torch.float64, device=self._device)
        self._removers = [
            weight.register_hook(self._observe).remove  # type: ignore[no-untyped-call]
            for weight in self.module.parameters()
            if weight.requires_grad
        ]

    def after_backward(self, batch: Batch) -> None:
        if not self._removers:
            return
        targets = self.targets(batch)
        if targets:
            self._sums += torch.stack(
                (self._square / targets, *self._square.new_tensor((targets, 1)))
            )
        self._square.zero_()

    def before_update(self, update: Update) -> None:
        if not self._removers:
            return
        for remove in self._removers:
            remove()
        self._removers = []
        shares, targets, count = self.accelerator.reduce(self._sums, "sum").tolist()
        # The loss of a micro-batch is divided by all targets.
        factor = self.factor()
        mean_square, square = shares * targets / factor**2, update.grad_norm**2
        if count < 2:
            self._warn()
        elif math.isfinite(mean_square) and math.isfinite(square):
            self.estimate.add(round(count), mean_square, square)
            self._report(update.step)

    def state_dict(self) -> Mapping[str, Any]:
        return asdict(self.estimate)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.estimate = NoiseEstimate(**state)

    def _observe(self, gradient: torch.Tensor) -> None:
        norm = torch.linalg.vector_norm(gradient.detach(), dtype=torch.float32)
        self._square += norm.double().square()

    def _report(self, step: int) -> None:
        batches = self.estimate.batches
        self.context.emit(
            NoiseScaleMeasured(
                attempt=self.context.attempt,
                step=step,
                noise=self.estimate.noise,
                signal=self.estimate.signal,
                critical_batch_size=None if batches is None else batches * self.batch,
            )
        )

    def _warn(self) -> None:
        if not self._warned:
            self._warned = True
            message = (
                "training.monitor.noise_scale measures nothing: the global batch is one "
                "micro-batch, so there is only one batch size; set training.micro_batch_size to "
                "at most half of training.global_batch_size"
            )
            self.context.emit(Warned(stage="train", message=message))
