"""Compute every metric that applies to a model's scores, built-in or from another package."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cache, partial
from typing import TypeVar

from steadytrain.components.evaluate.bootstrap import FloatArray, Resampling, replicate
from steadytrain.components.evaluate.metric import Metric
from steadytrain.components.evaluate.scores import Scores
from steadytrain.components.shared import plugins
from steadytrain.components.shared.errors import SteadytrainError
from steadytrain.components.shared.records import Interval

_Result = TypeVar("_Result")


@cache
def metrics() -> Mapping[str, Metric]:
    """Return all metrics by name, sorted by name.

    Raises:
        BadInput: a package's metric cannot be imported or is not a metric, or two metrics have the
            same name.
    """
    return {name: load_metric(name) for name in plugins.names(plugins.METRICS)}


def load_metric(name: str) -> Metric:
    """Return a metric.

    Raises:
        BadInput: it cannot be imported, or is not a metric.
    """
    return plugins.load_as(plugins.METRICS, name, Metric)


def measure(scores: Scores, how: Resampling) -> dict[str, Interval]:
    """Compute every metric that applies, each with its bootstrap interval."""
    values = point_values(scores)
    replicates = replicate(
        lambda weights: weighted_values(scores, weights, values), scores.units, how
    )
    return {name: how.interval(value, replicates[name]) for name, value in values.items()}


def measure_slices(scores: Scores) -> dict[str, dict[str, float]]:
    """Return "examples" and every metric that applies, by slice value."""
    return {
        value: {"examples": float(len(rows)), **point_values(scores.only(rows))}
        for value, rows in scores.by_slice().items()
    }


def point_values(scores: Scores) -> dict[str, float]:
    """Compute every metric that applies, and leave out undefined ones.

    Raises:
        SteadytrainError: a metric raised an exception.
    """
    found = {
        name: _computed(name, partial(metric.value, scores)) for name, metric in metrics().items()
    }
    return {name: value for name, value in found.items() if value is not None}


def weighted_values(
    scores: Scores, weights: FloatArray, names: Iterable[str]
) -> dict[str, FloatArray]:
    """Compute metrics with each example counted as often as its weight says.

    Args:
        weights: (resamples, examples).
        names: the metrics that apply.

    Returns:
        By name, (resamples,); NaN if undefined.
    """
    known = metrics()
    return {
        name: _computed(name, partial(known[name].resampled, scores, weights)) for name in names
    }


def _computed(name: str, compute: Callable[[], _Result]) -> _Result:
    """Run a metric's computation.

    Raises:
        SteadytrainError: it raised an exception. The message names the metric.
    """
    try:
        return compute()
    except Exception as error:
        raise SteadytrainError(
            f"the metric {name!r} cannot be computed: {type(error).__name__}: {error}",
            remedy="fix the metric, or uninstall the package that adds it",
        ) from error
