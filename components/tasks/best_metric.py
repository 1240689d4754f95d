"""The metric that selects the best model: whether it exists, and which direction is better."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from steadytrain.components.shared.config import TrainingConfig
from steadytrain.components.shared.errors import Problem

_GREATER_IS_BETTER: Final = {
    "loss": False,
    "perplexity": False,
    "accuracy": True,
    "macro_f1": True,
    "micro_f1": True,
    "subset_accuracy": True,
    "preference_accuracy": True,
    "preference_margin": True,
    "recall_at_1": True,
    "mean_reciprocal_rank": True,
    "mse": False,
    "rmse": False,
    "mae": False,
    "r2": True,
    "pearson": True,
}


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
    metric, given = chosen_metric(training) or own, training.greater_is_better
    if metric != own and metric not in known:
        return _problem(metric, "the task has no such metric", f"one of {', '.join(known)}")
    usual = _GREATER_IS_BETTER.get(metric)
    part, _, of_part = metric.rpartition("_")
    if {f"{part}_loss", f"{part}_accuracy"} <= set(known):
        usual = _GREATER_IS_BETTER.get(of_part)
    if given is not None and usual not in (None, given):
        return Problem(
            "training.greater_is_better",
            str(given).lower(),
            f"a {'higher' if usual else 'lower'} {metric} is better, so that this would keep the "
            "worst model",
            "leave it out",
        )
    if metric != own and greater_is_better(metric, given) is None:
        why = "it is not known whether higher or lower is better"
        return _problem(metric, why, "set training.greater_is_better too")
    return None


def greater_is_better(metric: str, given: bool | None) -> bool | None:
    """Return whether a higher value is better; None if neither the field nor the name says.

    Args:
        given: training.greater_is_better.
    """
    if given is not None:
        return given
    # A part's metric is PART_METRIC.
    return _GREATER_IS_BETTER.get(metric, _GREATER_IS_BETTER.get(metric.rpartition("_")[2]))


def _problem(metric: str, message: str, remedy: str) -> Problem:
    return Problem("training.metric_for_best_model", repr(metric), message, remedy)
