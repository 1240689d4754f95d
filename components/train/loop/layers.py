"""The monitor of layers: norms of their gradients, weights and updates."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import torch

from steadytrain.components.shared.events.types import LayersMeasured
from steadytrain.components.train.loop.training_component import (
    TrainingComponent,
    TrainingContext,
    Update,
)

SAMPLE: Final = 4096
"""Most elements of a weight from which the norm of its update is estimated. A copy of all weights
would need as much memory as the model."""


class LayerMonitor(TrainingComponent):
    """Measures every few steps, and changes nothing.

    Args:
        every: optimizer steps between two measurements.
    """

    def __init__(self, every: int) -> None:
        self.every = every
        self._measured: tuple[int, torch.Tensor, torch.Tensor] | None = None

    def begin(self, context: TrainingContext) -> None:
        self.context = context
        self.names = list(context.weights)
        self.layers = list(dict.fromkeys(map(layer_of, self.names)))
        places = {layer: place for place, layer in enumerate(self.layers)}
        self._layer_of = [places[layer_of(name)] for name in self.names]

    @torch.no_grad()
    def before_update(self, update: Update) -> None:
        # With complete weights on each rank, all ranks would measure the same.
        if update.step % self.every or (self.context.rank and not self.context.sharded):
            return
        weights, gradients = self._weights(), self.context.gradients()
        squares = torch.stack(
            (
                self._by_layer(_squares(self._in_order(gradients, weights))),
                self._by_layer(_squares(weights)),
            )
        )
        self._measured = update.step, squares, _sample(weights)

    @torch.no_grad()
    def after_update(self, update: Update) -> None:
        measured, self._measured = self._measured, None
        # A loss scaler may have skipped the update of the measured step.
        if measured is None or measured[0] != update.step:
            return
        weights = self._weights()
        changes = (_sample(weights) - measured[2]).split_with_sizes(
            [_taken(item) for item in weights]
        )
        moved = _squares(changes) * torch.tensor(
            [item.numel() / max(1, _taken(item)) for item in weights], device=changes[0].device
        )
        sums = torch.cat((measured[1], self._by_layer(moved).unsqueeze(0)))
        if self.context.sharded:
            torch.distributed.all_reduce(sums)
        gradient, weight, change = sums.sqrt().tolist()
        # Gradients are measured after clipping, which scales all of them alike.
        clipped = math.hypot(*gradient)
        scale = update.grad_norm / clipped if clipped and math.isfinite(update.grad_norm) else 1.0
        self.context.emit(
            LayersMeasured(
                attempt=self.context.attempt,
                step=update.step,
                gradient=self._named(value * scale for value in gradient),
                weight=self._named(weight),
                update=self._named(change),
            )
        )

    def _weights(self) -> list[torch.Tensor]:
        return [self.context.weights[name] for name in self.names]

    def _in_order(
        self, gradients: Mapping[str, torch.Tensor], weights: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Return the gradients in the order of the weights, with nothing where there is none."""
        return [
            gradients.get(name, weight.new_zeros(0))
            for name, weight in zip(self.names, weights, strict=True)
        ]

    def _by_layer(self, squares: torch.Tensor) -> torch.Tensor:
        """Return the sums over the weights of each layer."""
        sums = squares.new_zeros(len(self.layers))
        return sums.index_add_(0, torch.tensor(self._layer_of, device=squares.device), squares)

    def _named(self, values: Iterable[float]) -> dict[str, float]:
        return dict(zip(self.layers, values, strict=True))


def layer_of(weight: str) -> str:
    """Return the name of a weight's layer: up to the first number in it, or its module."""
    parts = weight.split(".")
    number = next((place for place, part in enumerate(parts) if part.isdigit()), None)
    return ".".join(parts[:-1] if number is None else parts[: number + 1]) or weight


def _squares(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the squared L2 norm of each tensor, in one call for all of them."""
    return torch.stack(torch._foreach_norm(list(tensors), 2)).float().square()


def _sample(weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return a copy of evenly spaced elements of all weights."""
    return torch.cat([item.flatten()[:: _stride(item)] for item in weights])


def _stride(weight: torch.Tensor) -> int:
    return max(1, math.ceil(weight.numel() / SAMPLE))


def _taken(weight: torch.Tensor) -> int:
    return math.ceil(weight.numel() / _stride(weight))
