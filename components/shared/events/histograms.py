"""Histograms of weights and gradients, as `LayersCounted` has them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from steadytrain.components.shared.events.types import LayersCounted


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
