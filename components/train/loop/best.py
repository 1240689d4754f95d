"""The metric that selects the best model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from steadytrain.components.shared.config import TrainingConfig
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.tasks.best_metric import chosen_metric, metric_problem


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
    if metric == own.metric:
        return metric, own.greater_is_better if given is None else given
    if problem := metric_problem(training, own.metric, names()):
        raise BadInput(
            f"{problem.field} = {problem.value}: {problem.message}", remedy=problem.remedy
        )
    return metric, bool(given)
