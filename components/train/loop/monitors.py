"""Components that only watch: norms and histograms of each layer, and a profile of a few steps."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import torch
from torch.profiler import ProfilerActivity, profile

from steadytrain.components.shared.events.points import edges_of
from steadytrain.components.shared.events.types import LayersCounted, LayersMeasured
from steadytrain.components.techniques.base import (
    TrainingComponent,
    TrainingContext,
    Update,
)

SAMPLE: Final = 4096
"""Most elements of a weight from which the norm of its update is estimated. A copy of all weights
would need as much memory as the model."""


class _Measurement(TrainingComponent):
    """Measures every few steps, and changes nothing.

    Args:
        every: optimizer steps between two measurements.
    """

    def __init__(self, every: int) -> None:
        self.every = every

    def begin(self, context: TrainingContext) -> None:
        self.context = context

    def is_due(self, update: Update) -> bool:
        """Return whether this rank measures at a step."""
        # With complete weights on each rank, all ranks would measure the same.
        return not update.step % self.every and (self.context.sharded or not self.context.rank)


class LayerMonitor(_Measurement):
    """Measures the norms of each layer's weights, gradients and updates."""

    def __init__(self, every: int) -> None:
        super().__init__(every)
        self._measured: tuple[int, torch.Tensor, torch.Tensor] | None = None

    def begin(self, context: TrainingContext) -> None:
        super().begin(context)
        self.names = list(context.weights)
        self.layers = list(dict.fromkeys(map(layer_of, self.names)))
        places = {layer: index for index, layer in enumerate(self.layers)}
        weights = self._weights()
        device = weights[0].device
        self._layer_of = torch.tensor(
            [places[layer_of(name)] for name in self.names], device=device
        )
        # Sizes stay the same, and to compute all of this again would cost more than the norms.
        sizes = [weight.numel() for weight in weights]
        self._strides = [max(1, math.ceil(size / SAMPLE)) for size in sizes]
        self._taken = [
            math.ceil(size / stride) for size, stride in zip(sizes, self._strides, strict=True)
        ]
        shares = [size / max(1, taken) for size, taken in zip(sizes, self._taken, strict=True)]
        self._scale = torch.tensor(shares, device=device)

    @torch.no_grad()
    def before_update(self, update: Update) -> None:
        if not self.is_due(update):
            return
        weights, gradients = self._weights(), self.context.gradients()
        squares = torch.stack(
            (
                self._by_layer(_squares(self._in_order(gradients, weights))),
                self._by_layer(_squares(weights)),
            )
        )
        self._measured = update.step, squares, self._sample(weights)

    @torch.no_grad()
    def after_update(self, update: Update) -> None:
        measured, self._measured = self._measured, None
        # A loss scaler may have skipped the update of the measured step.
        if measured is None or measured[0] != update.step:
            return
        change = self._sample(self._weights()) - measured[2]
        moved = _squares(change.split_with_sizes(self._taken)) * self._scale
        sums = torch.cat((measured[1], self._by_layer(moved).unsqueeze(0)))
        if self.context.sharded:
            torch.distributed.all_reduce(sums)
        gradient, weight, moves = sums.sqrt().tolist()
        # Gradients are measured after clipping, which scales all of them alike.
        clipped = math.hypot(*gradient)
        scale = update.grad_norm / clipped if clipped and math.isfinite(update.grad_norm) else 1.0
        self.context.emit(
            LayersMeasured(
                attempt=self.context.attempt,
                step=update.step,
                gradient=self._named(value * scale for value in gradient),
                weight=self._named(weight),
                update=self._named(moves),
            )
        )

    def _weights(self) -> list[torch.Tensor]:
        return [self.context.weights[name] for name in self.names]

    def _in_order(
        self, gradients: Mapping[str, torch.Tensor], weights: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Return the gradients in the order of the weights, with nothing where there is none."""
        return [
            gradients[name] if name in gradients else weight.new_zeros(0)
            for name, weight in zip(self.names, weights, strict=True)
        ]

    def _sample(self, weights: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return a copy of evenly spaced elements of all weights."""
        strides = zip(weights, self._strides, strict=True)
        return torch.cat([weight.flatten()[::stride] for weight, stride in strides])

    def _by_layer(self, squares: torch.Tensor) -> torch.Tensor:
        """Return the sums over the weights of each layer."""
        sums = squares.new_zeros(len(self.layers))
        return sums.index_add_(0, self._layer_of, squares)

    def _named(self, values: Iterable[float]) -> dict[str, float]:
        return dict(zip(self.layers, values, strict=True))


BINS: Final = 32
"""Intervals of a histogram."""
_AT_ONCE: Final = 1 << 20
"""Most elements that are counted at once: their intervals need several times their memory."""


class LayerHistograms(_Measurement):
    """Counts the weights and gradients of each layer by value.

    With parts of the weights on each rank, the ranks agree on the ends of each histogram and add
    their counts: the result is that of the complete tensors.
    """

    def __init__(self, every: int) -> None:
        super().__init__(every)
        self._gradients: tuple[int, dict[str, list[float]]] | None = None

    def begin(self, context: TrainingContext) -> None:
        super().begin(context)
        self.names: dict[str, list[str]] = {}
        for name in context.weights:
            self.names.setdefault(layer_of(name), []).append(name)

    @torch.no_grad()
    def before_update(self, update: Update) -> None:
        if not self.is_due(update):
            return
        self._gradients = update.step, self._histograms(self.context.gradients())

    @torch.no_grad()
    def after_update(self, update: Update) -> None:
        gradients, self._gradients = self._gradients, None
        # A loss scaler may have skipped the update of the measured step.
        if gradients is None or gradients[0] != update.step:
            return
        self.context.emit(
            LayersCounted(
                attempt=self.context.attempt,
                step=update.step,
                gradient=gradients[1],
                weight=self._histograms(self.context.weights),
            )
        )

    def _histograms(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, list[float]]:
        """Return lowest value, highest value and counts by layer, as `LayersCounted` has them."""
        layers = [
            [tensors[name].flatten() for name in names if name in tensors]
            for names in self.names.values()
        ]
        device = next(iter(self.context.weights.values())).device
        # The lowest is negated, so that one maximum over the ranks finds both.
        ends = torch.full((len(layers), 2), -math.inf, device=device)
        for index, parts in enumerate(layers):
            for part in (part for part in parts if part.numel()):
                low, high = part.aminmax()
                ends[index] = torch.maximum(ends[index], torch.stack((-low, high)).float())
        if self.context.sharded:
            torch.distributed.all_reduce(ends, torch.distributed.ReduceOp.MAX)
        known = [(-low, high) if math.isfinite(low + high) else None for low, high in ends.tolist()]
        counts = torch.zeros((len(layers), BINS), dtype=torch.int64, device=device)
        for index, (parts, span) in enumerate(zip(layers, known, strict=True)):
            if span is not None:
                inner = torch.tensor(edges_of(*span, BINS)[1:-1], device=device)
                for few in (few for part in parts for few in torch.split(part, _AT_ONCE)):
                    bins = torch.bucketize(few.float(), inner, out_int32=True, right=True)
                    counts[index] += bins.bincount(minlength=BINS)
        if self.context.sharded:
            torch.distributed.all_reduce(counts)
        return {
            layer: [*span, *each]
            for layer, span, each in zip(self.names, known, counts.tolist(), strict=True)
            if span is not None
        }


def layer_of(weight: str) -> str:
    """Return the name of a weight's layer: up to the first number in it, or its module."""
    parts = weight.split(".")
    number = next((index for index, part in enumerate(parts) if part.isdigit()), None)
    return ".".join(parts[:-1] if number is None else parts[: number + 1]) or weight


def _squares(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the squared L2 norm of each tensor, in one call for all of them."""
    return torch.stack(torch._foreach_norm(list(tensors), 2)).float().square()


FOLDER: Final = "profile"
_OPERATORS: Final = 20
"""Most operators in a summary."""
_ALLOCATIONS: Final = 100_000
"""Most allocations and releases in a snapshot of the memory."""


class StepProfiler(TrainingComponent):
    """Records some steps, and writes a trace, a summary and, on a GPU, a snapshot of the memory.

    Args:
        first: the first step that is recorded.
        last: the last one.
        device: where the rank computes.
    """

    def __init__(self, first: int, last: int, device: torch.device) -> None:
        self.first, self.last, self.cuda = first, last, device.type == "cuda"
        self.device = torch.cuda.get_device_name(device) if self.cuda else "cpu"
        self._profile: profile | None = None

    def begin(self, context: TrainingContext) -> None:
        self.folder, self.rank = context.folder / FOLDER, context.rank

    def before_step(self, step: int) -> None:
        if step != self.first:
            return
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self.cuda else [])]
        if self.cuda:
            torch.cuda.memory._record_memory_history(max_entries=_ALLOCATIONS)
            torch.cuda.synchronize()
        self._profile = profile(activities=activities)
        self._profile.start()
        self._began = time.monotonic()

    def after_step(self, step: int) -> None:
        if self._profile is None or step != self.last:
            return
        if self.cuda:
            torch.cuda.synchronize()
        seconds = time.monotonic() - self._began
        self._profile.stop()
        self.folder.mkdir(parents=True, exist_ok=True)
        start = str(self.folder / f"rank-{self.rank}")
        self._profile.export_chrome_trace(f"{start}.trace.json.gz")
        summary = self._summary(self._profile, seconds)
        self._profile = None
        if self.cuda:
            torch.cuda.memory._dump_snapshot(f"{start}.memory.pickle")  # type: ignore[no-untyped-call]
            torch.cuda.memory._record_memory_history(enabled=None)
        (self.folder / f"rank-{self.rank}.json").write_text(json.dumps(summary), encoding="utf-8")

    def _summary(self, recorded: profile, seconds: float) -> dict[str, Any]:
        """Return what was recorded, as `observe.profile.RankProfile` reads it."""
        column = "self_device_time_total" if self.cuda else "self_cpu_time_total"
        events = sorted(recorded.key_averages(), key=lambda item: -getattr(item, column))
        operators = [
            {"name": item.key, "seconds": getattr(item, column) / 1e6, "calls": item.count}
            for item in events[:_OPERATORS]
        ]
        return {
            "rank": self.rank,
            "first": self.first,
            "last": self.last,
            "device": self.device,
            "seconds": seconds,
            "busy_seconds": sum(getattr(item, column) for item in events) / 1e6,
            "memory_peak": torch.cuda.max_memory_allocated() if self.cuda else 0,
            "operators": operators,
        }
