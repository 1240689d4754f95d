"""The points of an attempt's curves, by the names that they have wherever a run is tracked."""

from __future__ import annotations

from collections.abc import Iterator

from steadytrain.components.shared.events.types import (
    NoiseScaleMeasured,
    RankUsage,
    TrainingStep,
    Validated,
)

Curved = TrainingStep | Validated | NoiseScaleMeasured
"""Events with points at an optimizer step."""

Pointed = Curved | RankUsage
"""Events with points."""


def place(event: Pointed) -> int:
    """Return where an event's points are on the axis of their curve."""
    return event.sample if isinstance(event, RankUsage) else event.step


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
