"""The metric that selects the best model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from steadytrain.components.shared.config import TrainingConfig
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.tasks.best_metric import (
    chosen_metric,
    greater_is_better,
    metric_problem,
)


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
    metric, given = chosen_metric(training) or own.metric, training.greater_is_better
    known = [metric] if metric == own.metric else names()
    if problem := metric_problem(training, own.metric, known):
        raise BadInput(
            f"{problem.field} = {problem.value}: {problem.message}", remedy=problem.remedy
        )
    if metric == own.metric and given is None:
        return metric, own.greater_is_better
    return metric, bool(greater_is_better(metric, given))
