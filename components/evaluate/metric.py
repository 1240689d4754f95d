"""The interface of a metric: a number computed from per-example scores, and its resampling.

A package adds a metric with an entry point in the group `steadytrain.metrics`. The entry point
names a `MeanMetric`, a `SampleMetric`, or an object with the methods of `Metric`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

from steadytrain.components.evaluate.bootstrap import FloatArray
from steadytrain.components.evaluate.pairs import mean
from steadytrain.components.evaluate.scores import Scores

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
