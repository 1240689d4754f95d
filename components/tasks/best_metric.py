"""The metric that selects the best model: whether it exists, and which direction is better."""

from __future__ import annotations

from collections.abc import Sequence

from steadytrain.components.shared.config import TrainingConfig
from steadytrain.components.shared.errors import Problem


def chosen_metric(training: TrainingConfig) -> str | None:
    """Return the metric that the configuration chooses; None for the task's own."""
    chosen = training.metric_for_best_model
    return chosen.removeprefix("eval_") if chosen else None


def metric_problem(training: TrainingConfig, own: str, known: Sequence[str]) -> Problem | None:
    """Return why the chosen metric cannot select the best model; None if it can.

    Args:
        own: the metric that the task selects by, whose direction it knows.
        known: the names of all validation metrics.
    """
    metric = chosen_metric(training)
    if metric is None or metric == own:
        return None
    message, remedy = "", ""
    if metric not in known:
        message, remedy = "the task has no such metric", f"one of {', '.join(known)}"
    elif training.greater_is_better is None:
        message = "it is not known whether higher or lower is better"
        remedy = "set training.greater_is_better too"
    field = "training.metric_for_best_model"
    return Problem(field, repr(metric), message, remedy) if message else None
