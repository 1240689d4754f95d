"""The candidate and another model on the same test examples, for the gate to compare."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from steadytrain.components.evaluate.bootstrap import FloatArray, IntArray

Resampled = Callable[[FloatArray], FloatArray]
"""Weights (resamples, examples) -> a metric (resamples,); NaN if undefined."""


@dataclass(frozen=True)
class Pair:
    """Two models on the same examples, in the same order.

    version, digest: the champion's version number and the digest of its weights.
    candidate, champion: each model's metric.
    units: (examples,), the unit of each example. Units count as a whole, negative ones not at all.
    slices: row numbers by slice value.
    """

    version: str
    digest: str
    candidate: Resampled
    champion: Resampled
    units: IntArray
    slices: Mapping[str, IntArray]


@dataclass(frozen=True)
class Rival:
    """A model that the candidate must beat even without a champion.

    what: names it, such as "the naive baseline".
    metric: the metric of both.
    candidate, rival: each model's metric.
    same: whether both have the same loss on each example.
    """

    what: str
    metric: str
    candidate: Resampled
    rival: Resampled
    same: bool = False


def mean(numerators: FloatArray, weights: FloatArray) -> Resampled:
    """Return a metric that adds up: the sum of numerators over the sum of weights.

    Args:
        numerators: (examples,).
        weights: (examples,).
    """

    def resampled(times: FloatArray) -> FloatArray:
        with np.errstate(invalid="ignore", divide="ignore"):
            values: FloatArray = times @ numerators / (times @ weights)
        return values

    return resampled
