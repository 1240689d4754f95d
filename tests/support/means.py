"""Candidate and champion scored by an additive metric, as arrays that tests change."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from steadytrain.components.evaluate.metric import Pair, mean, metrics

DIRECTIONS = {name: metric.greater_is_better for name, metric in metrics().items()}


@dataclass(frozen=True)
class Means:
    """candidate, champion, weights, units: arrays of shape (examples,)."""

    version: str
    digest: str
    candidate: np.ndarray
    champion: np.ndarray
    weights: np.ndarray
    units: np.ndarray
    slices: Mapping[str, np.ndarray]

    @property
    def value(self) -> float:
        """The candidate's metric."""
        return float(self.candidate.sum() / self.weights.sum())

    @property
    def pair(self) -> Pair:
        return Pair(
            self.version,
            self.digest,
            mean(self.candidate, self.weights),
            mean(self.champion, self.weights),
            self.units,
            self.slices,
        )
