"""The interface of a metric: a number computed from per-example scores, and its resampling.

A package adds a metric with an entry point in the group `steadytrain.metrics`. The entry point
names a `MeanMetric`, a `SampleMetric`, or an object with the methods of `Metric`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Protocol, TypeVar, runtime_checkable

import numpy as np

from steadytrain.components.evaluate.bootstrap import FloatArray, Resampling, replicate
from steadytrain.components.evaluate.scores import Scores, mean
from steadytrain.components.shared import plugins
from steadytrain.components.shared.errors import SteadytrainError
from steadytrain.components.shared.records import Interval

Parts = tuple[FloatArray, FloatArray]
"""Numerators and weights, (examples,) each."""


@runtime_checkable
class Metric(Protocol):
    """A metric of the test side, with its direction."""

    @property
    def greater_is_better(self) -> bool: ...

    def value(self, scores: Scores) -> float | None:
        """Return the metric over all examples, or None if it does not apply to these scores."""

    def resampled(self, scores: Scores, weights: FloatArray) -> FloatArray:
        """Compute the metric with each example counted as often as its weight says.

        Args:
            weights: (resamples, examples).

        Returns:
            (resamples,); NaN if undefined.
        """


@dataclass(frozen=True)
class MeanMetric:
    """A metric that adds up: the sum of the examples' numerators over the sum of their weights.

    parts: returns numerators and weights, or None if the metric does not apply.
    finish: turns means, (resamples,), into the metric, like the square root for a root mean squared
        error.
    """

    greater_is_better: bool
    parts: Callable[[Scores], Parts | None]
    finish: Callable[[FloatArray], FloatArray] | None = None

    def value(self, scores: Scores) -> float | None:
        parts = self.parts(scores)
        if parts is None:
            return None
        numerators, weights = parts
        return float(self._finished(numerators.sum(keepdims=True) / weights.sum())[0])

    def resampled(self, scores: Scores, weights: FloatArray) -> FloatArray:
        parts = self.parts(scores)
        assert parts is not None, "asked of scores to which it does not apply"
        return self._finished(mean(*parts)(weights))

    def _finished(self, means: FloatArray) -> FloatArray:
        return means if self.finish is None else self.finish(means)


@dataclass(frozen=True)
class SampleMetric:
    """A metric of a complete sample, such as the area under a ROC curve.

    of: computes the metric over all examples it gets, or returns None if it does not apply.
    at_once: does the same for many resamples, like `Metric.resampled`. If it is None, each resample
        is built and passed to `of`.
    """

    greater_is_better: bool
    of: Callable[[Scores], float | None]
    at_once: Callable[[Scores, FloatArray], FloatArray] | None = None

    def value(self, scores: Scores) -> float | None:
        return self.of(scores)

    def resampled(self, scores: Scores, weights: FloatArray) -> FloatArray:
        if self.at_once is not None:
            with np.errstate(invalid="ignore", divide="ignore"):
                return self.at_once(scores, weights)
        rows = np.arange(weights.shape[1])
        found = [self.of(scores.only(np.repeat(rows, times.astype(int)))) for times in weights]
        return np.array([np.nan if value is None else value for value in found], dtype=np.float64)


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
