"""The points of an attempt's curves, by the names that they have wherever a run is tracked."""

from __future__ import annotations

from collections.abc import Iterator

from steadytrain.components.shared.events.types import TrainingStep, Validated


def points(event: TrainingStep | Validated) -> Iterator[tuple[str, float]]:
    """Yield the name and value of each point that an event has."""
    if isinstance(event, Validated):
        yield from ((f"eval_{name}", number) for name, number in event.metrics.items())
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
