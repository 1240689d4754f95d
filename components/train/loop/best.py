"""The metric that selects the best model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from steadytrain.components.shared.config import TrainingConfig
from steadytrain.components.shared.errors import BadInput


class Judged(Protocol):
    """What has a metric of its own, such as a task."""

    metric: str
    greater_is_better: bool


def best_metric(
    training: TrainingConfig, own: Judged, names: Callable[[], Sequence[str]]
) -> tuple[str, bool]:
    """Return the metric that selects the best model, and whether a higher value is better.

    Args:
        names: returns the names of all validation metrics.

    Raises:
        BadInput: there is no such metric, or its direction is unknown.
    """
    metric = (training.metric_for_best_model or own.metric).removeprefix("eval_")
    if metric == own.metric:
        given = training.greater_is_better
        return metric, own.greater_is_better if given is None else given
    known = names()
    if metric not in known:
        raise BadInput(
            f"training.metric_for_best_model = {metric!r}: the task has no such metric",
            remedy=f"one of {', '.join(known)}",
        )
    if training.greater_is_better is None:
        raise BadInput(
            f"training.metric_for_best_model = {metric!r}: it is not known whether higher or "
            "lower is better",
            remedy="set training.greater_is_better too",
        )
    return metric, training.greater_is_better
