"""Learners of tables: boosted trees by LightGBM, and linear models by scikit-learn."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Final

import numpy as np
import numpy.typing as npt

from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.shared.records import DataRecord, Side
from steadytrain.components.tabular import model as exported
from steadytrain.components.tabular.columns import Table
from steadytrain.components.tabular.encoder import FEATURES, parsed
from steadytrain.components.tabular.model import (
    BoostedModel,
    LinearModel,
    Preparation,
    TableModel,
    log_probabilities,
    standardized,
)
from steadytrain.components.tasks.base import Row
from steadytrain.components.tasks.encoding.base import COLUMNS
from steadytrain.components.tasks.scoring.table import read_batches
from steadytrain.components.train.framework import Learned
from steadytrain.components.train.framework.learner import State

MODULE: Final = "model.py"
"""File of an exported model that can load it."""
_ROUNDS: Final = 10
_RATE: Final = 0.1
_PENALTY: Final = 1.0
_ITERATIONS: Final = 1000
_LARGE: Final = 1_000_000
"""Values of a matrix from which LightGBM uses all cores."""

Array = npt.NDArray[np.float64]


def read_table(data: DataRecord) -> Table:
    """Return the columns of prepared data."""
    return Table.model_validate_json(data.path(COLUMNS).read_text(encoding="utf-8"))


def read_side(data: DataRecord, side: Side) -> tuple[list[Mapping[str, Any]], Array]:
    """Return the records of a side, and their classes or numbers.

    Raises:
        DataError: a shard is corrupted.
    """
    records, labels = list[Mapping[str, Any]](), [np.zeros(0)]
    for batch in read_batches(data, side, [FEATURES, "label"]):
        records += parsed(batch)
        labels.append(batch.column("label").to_numpy().astype(np.float64))
    return records, np.concatenate(labels)


class TableLearner:
    """Learns all records of the training side in each step."""

    learns_all = True
    metric = "loss"
    greater_is_better = False
    parameters = 0
    model_type: ClassVar[str]
    settings: ClassVar[tuple[str, ...]]

    def __init__(self, config: RunConfig, data: DataRecord) -> None:
        self.config, self.labels = config, data.labels
        self.given = {name: it for name, it in config.model.config.items() if name != "model_type"}
        self._check_settings()
        self.seed = config.training.seed
        records, self.targets = read_side(data, "train")
        validation, self.held_out_targets = read_side(data, "validation")
        self.preparation = Preparation(read_table(data).features)
        self.preparation.fit(records)
        self.matrix = self.preparation.matrix(records, strict=False)
        self.held_out_matrix = self.preparation.matrix(validation, strict=False)
        # Threads that wait for each other are slower than one on a small table.
        self.threads = len(os.sched_getaffinity(0)) if self.matrix.size > _LARGE else 1

    def _check_settings(self) -> None:
        found = self.config.model.config.get("model_type")
        if found != self.model_type:
            raise BadInput(
                f"model.config.model_type = {found!r}: model.framework "
                f"{self.config.model.framework} trains {self.model_type}",
                remedy=f"set it to {self.model_type}",
            )
        for name in self.given.keys() - {*self.settings}:
            raise BadInput(
                f"model.config.{name} = {self.given[name]!r}: {self.model_type} has no such "
                "setting",
                remedy=f"use {', '.join(sorted(self.settings))}",
            )

    @property
    def outputs(self) -> int:
        """Number of raw outputs: one for a number or for two classes, else one for each class."""
        return len(self.labels) if len(self.labels) > 2 else 1

    def base(self) -> list[float]:
        """Return the best constant outputs: the mean, or the logarithms of the shares of classes.

        Each class counts once more than it occurs, so that none has a probability of 0.
        """
        if not self.labels:
            return [float(self.targets.mean())]
        counts = np.bincount(self.targets.astype(int), minlength=len(self.labels)) + 1.0
        logs = np.log(counts / counts.sum())
        return [float(logs[1] - logs[0])] if len(logs) == 2 else logs.tolist()

    def losses(self, raw: Array, targets: Array) -> Array:
        """Return the loss of each row: (rows,), in nats, or the squared error of a number."""
        if not self.labels:
            return np.square(raw[:, 0] - targets)
        found: Array = -log_probabilities(raw)[np.arange(len(targets)), targets.astype(int)]
        return found

    def validate(self, rows: Iterable[Row]) -> Mapping[str, float]:
        del rows
        raw, targets = self.held_out(), self.held_out_targets
        loss = float(self.losses(raw, targets).mean())
        if not self.labels:
            absolute = float(np.abs(raw[:, 0] - targets).mean())
            return {"loss": loss, "rmse": math.sqrt(loss), "mae": absolute}
        hits = log_probabilities(raw).argmax(axis=1) == targets
        return {"loss": loss, "accuracy": float(hits.mean())}

    @abstractmethod
    def held_out(self) -> Array:
        """Return the raw outputs for the validation side: (rows, outputs)."""

    @abstractmethod
    def model(self) -> TableModel:
        """Return what has been learned so far."""

    def export(self, folder: Path) -> None:
        self.model().save(folder)
        shutil.copyfile(exported.__file__, folder / MODULE)


class LightGBMLearner(TableLearner):
    """Boosted trees. A step adds `model.config.rounds_per_step` trees for each output.

    Each step begins from the raw outputs of the trees before it, and its random numbers depend on
    their count alone. So an interrupted training run continues with the very same trees.
    """

    model_type = "lightgbm"
    libraries = ("lightgbm",)
    settings = (
        *("rounds_per_step", "num_leaves", "max_depth", "min_data_in_leaf", "max_bin"),
        *("lambda_l1", "lambda_l2", "min_gain_to_split", "bagging_fraction", "bagging_freq"),
        *("feature_fraction", "extra_trees", "cat_smooth", "cat_l2", "min_data_per_group"),
        *("path_smooth", "linear_tree", "max_cat_threshold", "min_sum_hessian_in_leaf"),
    )

    def __init__(self, config: RunConfig, data: DataRecord) -> None:
        super().__init__(config, data)
        self.rounds = self.given.pop("rounds_per_step", _ROUNDS)
        if type(self.rounds) is not int or self.rounds < 1:
            raise BadInput(
                f"model.config.rounds_per_step = {self.rounds!r}: it is not a whole number above 0",
                remedy=f"use a number of trees such as {_ROUNDS}",
            )
        self.rate = config.training.learning_rate or _RATE
        self.binned: Any = None
        self._begin()

    def _begin(self) -> None:
        """Have no trees."""
        self.texts, self.parameters = list[str](), 0
        self.raw = np.tile(self.base(), (len(self.targets), 1))
        self.raw_held_out = np.tile(self.base(), (len(self.held_out_targets), 1))

    def learn(self, rows: Sequence[Row], *, learning_rate_scale: float) -> Learned:
        import lightgbm

        del rows
        rate = self.rate * learning_rate_scale
        settings = {
            **self.given,
            "objective": self._objective(),
            "learning_rate": rate,
            "num_threads": self.threads,
            "seed": self.seed + len(self.texts),
            "data_random_seed": self.seed,
            "deterministic": True,
            "force_row_wise": True,
            "boost_from_average": False,
            "verbosity": -1,
        }
        if self.outputs > 1:
            settings["num_class"] = self.outputs
        try:
            if self.binned is None:
                # Once, because binning takes longer than the trees of a step.
                self.binned = lightgbm.Dataset(
                    self.matrix,
                    self.targets,
                    categorical_feature=self.preparation.categories,
                    params=settings,
                    free_raw_data=False,
                ).construct()
            self.binned.set_init_score(self.raw.ravel(order="F"))
            booster = lightgbm.train(settings, self.binned, num_boost_round=self.rounds)
        except lightgbm.basic.LightGBMError as error:
            raise BadInput(
                f"model.config: LightGBM refuses these settings: {error}",
                remedy="fix the setting that it names",
            ) from error
        self._add(booster.model_to_string())
        return Learned(float(self.losses(self.raw, self.targets).mean()), rate)

    def _objective(self) -> str:
        if not self.labels:
            return "regression"
        return "binary" if self.outputs == 1 else "multiclass"

    def _add(self, text: str) -> None:
        """Add the trees of a step."""
        import lightgbm

        # Read again, so that a model from a checkpoint gives the same bits.
        booster = lightgbm.Booster(model_str=text)
        self.texts.append(text)
        self.parameters += sum(map(int, re.findall(r"^num_leaves=(\d+)$", text, re.MULTILINE)))
        self.raw = self.raw + _raw(booster, self.matrix, self.threads)
        self.raw_held_out = self.raw_held_out + _raw(booster, self.held_out_matrix, self.threads)

    def held_out(self) -> Array:
        return self.raw_held_out

    def model(self) -> TableModel:
        shared = self.preparation, self.labels, self.base()
        return BoostedModel(*shared, booster=merged(self.texts))

    def state(self) -> State:
        content = json.dumps(self.texts).encode()
        return {"trees": np.frombuffer(content, np.uint8).copy()}

    def restore(self, state: State) -> None:
        self._begin()
        for text in json.loads(state["trees"].tobytes()):
            self._add(text)


def _raw(booster: Any, matrix: Array, threads: int) -> Array:
    if not len(matrix):
        return np.zeros((0, booster.num_model_per_iteration()))
    found = booster.predict(matrix, raw_score=True, num_threads=threads)
    return np.asarray(found, dtype=np.float64).reshape(len(matrix), -1)


def merged(texts: Sequence[str]) -> Any:
    """Return one lightgbm.Booster with the trees of several, in their order."""
    import lightgbm
    from lightgbm.basic import _LIB, _safe_call

    whole, *before = [lightgbm.Booster(model_str=text) for text in reversed(texts)]
    for booster in before:
        # LightGBM puts the other one's trees first.
        _safe_call(_LIB.LGBM_BoosterMerge(whole._handle, booster._handle))
    return whole


class LinearLearner(TableLearner):
    """A linear model, which one step fits: ridge regression, or logistic regression.

    `model.config.penalty` is the strength of the L2 penalty on the weights of standardized columns.
    """

    model_type = "linear"
    libraries = ("sklearn.linear_model",)
    settings = ("penalty",)

    def __init__(self, config: RunConfig, data: DataRecord) -> None:
        super().__init__(config, data)
        self.penalty = self.given.get("penalty", _PENALTY)
        self._check(config)
        dense = self.preparation.one_hot(self.matrix)
        medians = np.array([_median(column) for column in dense.T])
        filled = np.where(np.isnan(dense), medians, dense)
        deviation = filled.std(axis=0)
        self.scaling = {
            "fill": medians,
            "mean": filled.mean(axis=0),
            "deviation": np.where(deviation > 0, deviation, 1.0),
        }
        self.inputs = standardized(dense, **self.scaling)
        self.weights = np.zeros((dense.shape[1], self.outputs))
        self.intercept = np.array(self.base())
        self.parameters = self.weights.size + self.intercept.size

    def _check(self, config: RunConfig) -> None:
        penalty, rate = self.penalty, config.training.learning_rate
        number = isinstance(penalty, int | float) and not isinstance(penalty, bool)
        if not number or not 0 < penalty < math.inf:
            raise BadInput(
                f"model.config.penalty = {penalty!r}: it is not a number above 0",
                remedy="use a number such as 1.0",
            )
        if rate is not None:
            raise BadInput(
                f"training.learning_rate = {rate:g}: a linear model is fitted in one step without "
                "one",
                remedy="leave it out",
            )
        seen = {*self.targets.astype(int).tolist()} if self.labels else set[int]()
        if absent := [name for place, name in enumerate(self.labels) if place not in seen]:
            raise BadInput(
                f"no training record has the class {absent[0]!r}, so no linear model learns it",
                remedy="leave it out of data.labels, or give more data",
            )

    def learn(self, rows: Sequence[Row], *, learning_rate_scale: float) -> Learned:
        from sklearn.linear_model import LogisticRegression, Ridge

        del rows
        if self.labels:
            fitted = LogisticRegression(C=1 / self.penalty, max_iter=_ITERATIONS)
            fitted.fit(self.inputs, self.targets.astype(int))
            if max(fitted.n_iter_) >= _ITERATIONS:
                raise BadInput(
                    f"model.config.penalty = {self.penalty:g}: the linear model has not converged "
                    f"after {_ITERATIONS} iterations",
                    remedy="raise the penalty",
                )
        else:
            fitted = Ridge(alpha=self.penalty)
            fitted.fit(self.inputs, self.targets)
        self.weights = np.asarray(fitted.coef_, np.float64).reshape(self.outputs, -1).T
        self.intercept = np.asarray(fitted.intercept_, np.float64).reshape(-1)
        raw = self.inputs @ self.weights + self.intercept
        return Learned(float(self.losses(raw, self.targets).mean()), learning_rate_scale)

    def held_out(self) -> Array:
        found: Array = self.model().raw(self.held_out_matrix)
        return found

    def model(self) -> TableModel:
        shared = self.preparation, self.labels, self.intercept.tolist()
        return LinearModel(*shared, weights=self.weights, **self.scaling)

    def state(self) -> State:
        return {"weights": self.weights, "intercept": self.intercept}

    def restore(self, state: State) -> None:
        self.weights, self.intercept = state["weights"], state["intercept"]


def _median(column: Array) -> float:
    present = column[~np.isnan(column)]
    return float(np.median(present)) if len(present) else 0.0
