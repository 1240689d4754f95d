"""Models by scikit-learn: the same for all records, linear, neighbors, forests, boosted trees."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final

import numpy as np

from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.config.data_sections import TABLES
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.shared.records import DataRecord
from steadytrain.components.tabular.learners.base import Array, ConstantLearner, TableLearner
from steadytrain.components.tabular.learners.trees import (
    ExtraTreesLearner,
    HistogramBoostingLearner,
    RandomForestLearner,
)
from steadytrain.components.tabular.model import (
    LinearModel,
    NeighborsModel,
    TableModel,
    filled,
    standardized,
)
from steadytrain.components.tasks.base import Row
from steadytrain.components.train.framework import Learned, LearnerTrainer
from steadytrain.components.train.framework.learner import State

_PENALTY: Final = 1.0
_ITERATIONS: Final = 1000
_NEIGHBORS: Final = 5
_REPORTED: Final = 1000
"""Records of the training side whose neighbors are looked for, for the reported loss."""


class StandardizingLearner(TableLearner):
    """Reads standardized numbers and categories."""

    def __init__(self, config: RunConfig, data: DataRecord) -> None:
        super().__init__(config, data)
        dense = self.preparation.one_hot(self.matrix)
        medians = np.array([_median(column) for column in dense.T])
        whole = filled(dense, medians)
        deviation = whole.std(axis=0)
        self.scaling = {
            "fill": medians,
            "mean": whole.mean(axis=0),
            "deviation": np.where(deviation > 0, deviation, 1.0),
        }
        self.inputs = standardized(dense, **self.scaling)

    def limited(self) -> AbstractContextManager[Any]:
        """Return a context in which the linear algebra has the threads of this learner.

        A rank that is forked has loaded it with a single one, whatever its variables say.
        """
        from threadpoolctl import threadpool_limits

        limits: AbstractContextManager[Any] = threadpool_limits(self.threads)
        return limits

    def validate(self, rows: Iterable[Row]) -> Mapping[str, float]:
        with self.limited():
            return super().validate(rows)


class LinearLearner(StandardizingLearner):
    """A linear model, which one step fits: ridge regression, or logistic regression.

    `model.config.penalty` is the strength of the L2 penalty on the weights of standardized columns.
    """

    model_type = "linear"
    settings = ("penalty",)

    def __init__(self, config: RunConfig, data: DataRecord) -> None:
        super().__init__(config, data)
        self.penalty = self.given.get("penalty", _PENALTY)
        self._check()
        self.weights = np.zeros((self.inputs.shape[1], self.outputs))
        self.intercept = np.array(self.base())
        self.parameters = self.weights.size + self.intercept.size

    def _check(self) -> None:
        penalty = self.penalty
        number = isinstance(penalty, int | float) and not isinstance(penalty, bool)
        if not number or not 0 < penalty < math.inf:
            raise BadInput(
                f"model.config.penalty = {penalty!r}: it is not a number above 0",
                remedy="use a number such as 1.0",
            )

    def learn(self, rows: Sequence[Row], *, learning_rate_scale: float) -> Learned:
        from sklearn.linear_model import LogisticRegression, Ridge

        del rows
        if self.labels:
            fitted = LogisticRegression(C=1 / self.penalty, max_iter=_ITERATIONS)
            with self.limited():
                fitted.fit(self.inputs, self.targets.astype(int), self.row_weights)
            if max(fitted.n_iter_) >= _ITERATIONS:
                raise BadInput(
                    f"model.config.penalty = {self.penalty:g}: the linear model has not converged "
                    f"after {_ITERATIONS} iterations",
                    remedy="raise the penalty",
                )
        else:
            fitted = Ridge(alpha=self.penalty)
            with self.limited():
                fitted.fit(self.inputs, self.targets, self.row_weights)
        self.weights = np.asarray(fitted.coef_, np.float64).reshape(self.outputs, -1).T
        self.intercept = np.asarray(fitted.intercept_, np.float64).reshape(-1)
        raw = self.inputs @ self.weights + self.intercept
        return Learned(self.training_loss(raw), learning_rate_scale)

    def model(self) -> TableModel:
        shared = self.preparation, self.labels, self.intercept.tolist()
        return LinearModel(*shared, weights=self.weights, **self.scaling)

    def state(self) -> State:
        return {"weights": self.weights, "intercept": self.intercept}

    def restore(self, state: State) -> None:
        self.weights, self.intercept = state["weights"], state["intercept"]


class NeighborsLearner(StandardizingLearner):
    """The records of the training side themselves; one step suffices."""

    model_type = "knn"
    stores_rows = True
    weighs = False
    needs_classes = False
    settings = ("n_neighbors", "weights")

    def __init__(self, config: RunConfig, data: DataRecord) -> None:
        super().__init__(config, data)
        self.count, weights = (
            self.given.get("n_neighbors", _NEIGHBORS),
            self.given.get("weights", "uniform"),
        )
        if type(self.count) is not int or not 0 < self.count <= len(self.targets):
            raise BadInput(
                f"model.config.n_neighbors = {self.count!r}: it is not a whole number from 1 to "
                f"the {len(self.targets):,} training records",
                remedy=f"use a number such as {_NEIGHBORS}",
            )
        if weights not in ("uniform", "distance"):
            raise BadInput(
                f"model.config.weights = {weights!r}: it is not uniform or distance",
                remedy="use one of them",
            )
        self.close = weights == "distance"
        self.parameters = self.inputs.size

    def learn(self, rows: Sequence[Row], *, learning_rate_scale: float) -> Learned:
        del rows
        some = np.linspace(0, len(self.targets) - 1, min(_REPORTED, len(self.targets))).astype(int)
        with self.limited():
            raw = self.model().raw(self.matrix[some])
        return Learned(float(self.losses(raw, self.targets[some]).mean()), learning_rate_scale)

    def model(self) -> TableModel:
        base = np.log(self.shares()).tolist() if self.labels else [0.0]
        return NeighborsModel(
            *(self.preparation, self.labels, base),
            inputs=self.inputs,
            targets=self.targets,
            count=self.count,
            close=self.close,
            **self.scaling,
        )

    def state(self) -> State:
        return {}

    def restore(self, state: State) -> None:
        del state


def _median(column: Array) -> float:
    present = column[~np.isnan(column)]
    return float(np.median(present)) if len(present) else 0.0


MODELS: Final[dict[str, type[TableLearner]]] = {
    learner.model_type: learner
    for learner in (
        *(ConstantLearner, LinearLearner, NeighborsLearner),
        *(RandomForestLearner, ExtraTreesLearner, HistogramBoostingLearner),
    )
}


def learner(config: RunConfig, data: DataRecord) -> TableLearner:
    """Return the learner that `model.config.model_type` names."""
    name = config.model.config.get("model_type")
    if name not in MODELS:
        raise BadInput(
            f"model.config.model_type = {name!r}: model.framework sklearn has no such model of "
            "tables",
            remedy=f"use {', '.join(sorted(MODELS))}",
        )
    return MODELS[name](config, data)


SKLEARN: Final = LearnerTrainer(
    learner, ("sklearn.ensemble", "sklearn.linear_model"), on_cpu=TABLES
)
