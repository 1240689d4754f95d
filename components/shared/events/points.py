"""What trackers draw of an event: its points, and its histograms of weights and gradients."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from steadytrain.components.shared.events.types import (
    LayersCounted,
    NoiseScaleMeasured,
    RankUsage,
    TrainingStep,
    Validated,
)


@dataclass(frozen=True)
class Histogram:
    """How many values are in each of several equal intervals from `low` to `high`."""

    low: float
    high: float
    counts: Sequence[int]

    @property
    def edges(self) -> list[float]:
        """The ends of all intervals, one more than counts."""
        return edges_of(self.low, self.high, len(self.counts))


def edges_of(low: float, high: float, bins: int) -> list[float]:
    """Return the ends of equal intervals: each has its lower one, the last has both."""
    return [low + (high - low) * index / bins for index in range(bins)] + [high]


def histograms(event: LayersCounted) -> Iterator[tuple[str, Histogram]]:
    """Yield the histograms of an event, each with a name such as `weights/model.layers.0`."""
    for kind, layers in (("gradients", event.gradient), ("weights", event.weight)):
        yield from ((f"{kind}/{layer}", it) for layer, it in by_layer(layers).items())


def by_layer(layers: Mapping[str, Sequence[float]]) -> dict[str, Histogram]:
    """Return the histograms of a field of `LayersCounted`."""
    return {
        layer: Histogram(low, high, [int(count) for count in counts])
        for layer, (low, high, *counts) in layers.items()
    }


Curved = TrainingStep | Validated | NoiseScaleMeasured
"""Events with points at an optimizer step."""

Shown = Curved | LayersCounted
"""Events with points or histograms at an optimizer step."""

Pointed = Curved | RankUsage
"""Events with points."""


def axis_position(event: Pointed) -> int:
    """Return where an event's points are on the axis of their curve."""
    return event.sample if isinstance(event, RankUsage) else event.step


def shown_at(event: Shown) -> Iterator[tuple[str, float | Histogram]]:
    """Yield the name and value of each point or histogram that an event has."""
    yield from histograms(event) if isinstance(event, LayersCounted) else points(event)


def points(event: Pointed) -> Iterator[tuple[str, float]]:
    """Yield the name and value of each point that an event has."""
    if isinstance(event, Validated):
        yield from ((f"eval_{name}", number) for name, number in event.metrics.items())
        return
    if isinstance(event, RankUsage):
        yield from _used(event)
        return
    if isinstance(event, NoiseScaleMeasured):
        if event.critical_batch_size is not None:
            yield "critical_batch_size", event.critical_batch_size
        return
    yield "loss", event.loss
    yield "learning_rate", event.learning_rate
    yield "grad_norm", event.grad_norm
    yield "tokens_per_second", event.tokens_per_second
    yield "padding", event.padding
    yield "data_wait", event.data_wait
    if event.communication_wait is not None:
        yield "communication_wait", event.communication_wait
    if event.gpu_utilization is not None:
        yield "gpu_utilization", event.gpu_utilization
    yield "memory_used", event.memory_used
    yield "gpu_memory_used", event.gpu_memory_used
    yield "epoch", event.epoch


def _used(event: RankUsage) -> Iterator[tuple[str, float]]:
    folder = f"system/rank-{event.rank}"
    yield f"{folder}/memory_used", event.memory_used
    yield f"{folder}/cores_used", event.cores_used
    if event.gpu_memory_reserved:
        yield f"{folder}/gpu_memory_used", event.gpu_memory_used
        yield f"{folder}/gpu_memory_reserved", event.gpu_memory_reserved
        yield f"{folder}/gpu_memory_peak", event.gpu_memory_peak
    if event.gpu_utilization is not None:
        yield f"{folder}/gpu_utilization", event.gpu_utilization
