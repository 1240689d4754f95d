"""What learners of networks share, whatever library trains them."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from statistics import NormalDist
from typing import Any, Final

import numpy as np

from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.shared.records import DataRecord
from steadytrain.components.tabular.learners.base import Array, TableLearner
from steadytrain.components.tabular.model import (
    CATEGORIES,
    NetworkInputs,
    NetworkModel,
    TableModel,
)

GRADIENT: Final = 1.0
"""L2 norm to which gradients are clipped."""
_QUANTILES: Final = 1000
_DEFAULTS: Final = {"width": 256, "layers": 3, "dropout": 0.1, "weight_decay": 1e-4}
_RATE: Final = 1e-3
_BATCH: Final = 256
"""Records of a step of the optimizer. Small tables have fewer, for at least 16 steps an epoch."""


def embedding_size(count: int) -> int:
    """Return how many numbers stand for each of the categories of a column."""
    return min(16, 1 + math.ceil(math.sqrt(count)))


class NetworkLearner(TableLearner):
    """A step is an epoch. The model is a `NetworkModel`, which only needs NumPy.

    sizes: the settings that are numbers.
    batch: records of a step of the optimizer.
    middle: the mean and the deviation of the numbers to predict.
    aims: the classes or labels of the training side, or its numbers in deviations from the mean.
    scale: what a squared error in deviations is multiplied by.
    """

    model_type = "mlp"
    has_rate = True
    settings = ("width", "layers", "dropout", "weight_decay", "batch_size")

    def __init__(self, config: RunConfig, data: DataRecord) -> None:
        super().__init__(config, data)
        self.sizes = {name: self._number(name, like) for name, like in _DEFAULTS.items()}
        fitting = max(16, min(_BATCH, len(self.targets) // 16))
        self.batch = int(self._number("batch_size", fitting))
        self.rate = config.training.learning_rate or _RATE
        categories = self.preparation.categories
        arrays = _quantiles(self.matrix, categories)
        arrays["gaps"] = np.isnan(self.matrix).any(axis=0)
        arrays["gaps"][categories] |= (self.matrix[:, categories] >= CATEGORIES).any(axis=0)
        self.inputs = NetworkInputs(self.preparation, arrays)
        self.middle, self.aims, self.scale = np.zeros(2), self.targets, 1.0
        if not self.labels:
            mean = np.average(self.targets, weights=self.row_weights)
            self.middle = np.array([mean, self.targets.std() or 1.0])
            self.aims = (self.targets - self.middle[0]) / self.middle[1]
            self.scale = float(self.middle[1]) ** 2
        self.epochs = 0

    def _number(self, name: str, like: float) -> float:
        result = self.given.get(name, like)
        whole, least = isinstance(like, int), 1 if isinstance(like, int) else 0
        most = 1 if name == "dropout" else math.inf
        kinds = int if whole else (int, float)
        if isinstance(result, bool) or not isinstance(result, kinds) or not least <= result < most:
            raise BadInput(
                f"model.config.{name} = {result!r}: it is not a {'whole ' * whole}number from "
                f"{least}{' to below 1' * (name == 'dropout')}",
                remedy=f"use a number such as {like}",
            )
        return result

    @abstractmethod
    def trained(self) -> Mapping[str, Any]:
        """Return the weights, by their names in `NetworkModel`."""

    def model(self) -> TableModel:
        shared = self.preparation, self.labels, self.middle
        result = NetworkModel(*shared, **self.inputs.arrays, **self.trained())
        result.sets = self.sets
        return result


def _quantiles(matrix: Array, categories: Sequence[int]) -> dict[str, Any]:
    """Return points of each column of numbers, and what a normal distribution has there."""
    points, scores, ends = [np.zeros(0)], [np.zeros(0)], [0]
    normal = NormalDist()
    for index in range(matrix.shape[1]):
        if index in categories:
            continue
        present = np.sort(matrix[:, index][~np.isnan(matrix[:, index])])
        shares = np.linspace(0, 1, min(_QUANTILES, len(present)))
        values = np.quantile(present, shares) if len(present) else np.zeros(0)
        unique, where = np.unique(values, return_inverse=True)
        # A value that is often there has the mean of its shares.
        middle = np.bincount(where, shares) / np.maximum(np.bincount(where), 1)
        points.append(unique)
        scores.append(np.array([normal.inv_cdf(min(max(x, 1e-3), 1 - 1e-3)) for x in middle]))
        ends.append(ends[-1] + len(unique))
    return {
        "points": np.concatenate(points),
        "scores": np.concatenate(scores),
        "ends": np.array(ends),
    }
