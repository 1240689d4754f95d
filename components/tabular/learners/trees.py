"""Forests and boosted trees by scikit-learn. Their trees become arrays, which no library reads."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.records import DataRecord
from steadytrain.components.tabular.learners.base import Array, TreesLearner
from steadytrain.components.tabular.model import (
    CATEGORIES,
    ForestModel,
    TableModel,
    Trees,
    TreesModel,
    joined,
)


class SklearnTreesLearner(TreesLearner):
    """The trees of a step are the arrays of `model.Trees`, or what else `next_part` needs."""

    def width(self) -> int:
        """Return how many outputs the trees add up to."""
        return len(self.start())

    def trees(self, part: bytes) -> Trees:
        """Return the trees of a step."""
        return Trees(**_unpacked(part))

    def added(self, part: bytes, *matrices: Array) -> tuple[int, list[Array]]:
        trees = self.trees(part)
        leaves = int((trees.arrays["feature"] < 0).sum())
        return leaves, [trees.sums(matrix, self.width()) for matrix in matrices]

    def shared(self) -> tuple[Any, ...]:
        return self.preparation, self.labels, self.base()


def _packed(arrays: Mapping[str, Any]) -> bytes:
    content = io.BytesIO()
    np.savez(content, **arrays)
    return content.getvalue()


def _unpacked(part: bytes) -> dict[str, Any]:
    with np.load(io.BytesIO(part)) as stored:
        return {name: stored[name] for name in stored.files}


class ForestLearner(SklearnTreesLearner):
    """Trees that vote with the shares of the classes in their leaves, or the mean of their numbers.

    The shares in the training side count as one more tree, so that no class has a probability of 0.
    Categories are numbered by frequency. Missing values go to the side that is better for them.
    """

    settings = (
        *("rounds_per_step", "criterion", "max_depth", "min_samples_split", "min_samples_leaf"),
        *("max_features", "max_leaf_nodes", "min_impurity_decrease", "ccp_alpha"),
        *("bootstrap", "max_samples"),
    )
    has_rate = False
    stores_rows = True
    estimators: tuple[str, str]

    def base(self) -> list[float]:
        if not self.labels:
            return [0.0]
        logs: list[float] = np.log(self.shares()).tolist()
        return logs

    def start(self) -> list[float]:
        return self.shares().tolist() if self.labels else [0.0]

    def raw_outputs(self, sums: Array) -> Array:
        if self.labels:
            logs: Array = np.log(sums)
            return logs
        mean: Array = sums / max(1, len(self.parts) * self.rounds)
        return mean

    def next_part(self, rate: float) -> bytes:
        from sklearn import ensemble

        del rate
        most = np.finfo(np.float32).max
        try:
            forest = getattr(ensemble, self.estimators[not self.labels])(
                **self.given,
                n_estimators=self.rounds,
                random_state=self.seed + len(self.parts) * self.rounds,
                n_jobs=self.threads,
            )
            forest.fit(np.clip(self.matrix, -most, most), self.targets, self.row_weights)
        except (TypeError, ValueError) as error:
            raise self.refused(error) from error
        return _packed(
            joined([_of_forest(each.tree_, bool(self.labels)) for each in forest]).arrays
        )

    def model(self) -> TableModel:
        whole = joined([self.trees(part) for part in self.parts])
        return ForestModel(*self.shared(), **whole.arrays)


def _of_forest(tree: Any, classes: bool) -> Trees:
    nodes = tree.__getstate__()["nodes"]
    value = tree.value[:, 0, :]
    return Trees(
        feature=np.where(nodes["left_child"] < 0, -1, nodes["feature"]).astype(np.int32),
        threshold=nodes["threshold"],
        left=nodes["left_child"].astype(np.int32),
        right=nodes["right_child"].astype(np.int32),
        missing_left=nodes["missing_go_to_left"].astype(bool),
        value=value / value.sum(axis=1, keepdims=True) if classes else value,
        roots=np.zeros(1, np.int32),
        bitset=np.full(len(nodes), -1, np.int32),
        bitsets=np.zeros((0, 8), np.uint32),
        single=np.array(True),
    )


class RandomForestLearner(ForestLearner):
    """Trees on samples of the records."""

    model_type = "random_forest"
    estimators = "RandomForestClassifier", "RandomForestRegressor"


class ExtraTreesLearner(ForestLearner):
    """Trees whose thresholds are random."""

    model_type = "extra_trees"
    estimators = "ExtraTreesClassifier", "ExtraTreesRegressor"


class HistogramBoostingLearner(SklearnTreesLearner):
    """Boosted trees on 255 bins. Only the 255 most frequent categories of a column count."""

    model_type = "hist_boosting"
    settings = (
        *("rounds_per_step", "max_leaf_nodes", "max_depth", "min_samples_leaf"),
        *("l2_regularization", "monotone"),
    )

    def __init__(self, config: RunConfig, data: DataRecord) -> None:
        self.estimator: Any = None
        super().__init__(config, data)
        categories = self.preparation.categories
        # Where scikit-learn puts categories too, so that it moves no column.
        others = set(range(self.matrix.shape[1])).difference(categories)
        self.order = np.array([*categories, *sorted(others)], int)
        self.inputs = self.matrix[:, self.order]
        rare = self.inputs[:, : len(categories)] >= CATEGORIES
        self.inputs[:, : len(categories)][rare] = np.nan

    def shares(self) -> Array:
        result: Array = self.counted() / self.counted().sum()
        return result

    def next_part(self, rate: float) -> bytes:
        from threadpoolctl import threadpool_limits

        before = len(self.parts) * self.rounds
        try:
            with threadpool_limits(self.threads, "openmp"):
                if self.estimator is None:
                    self.estimator = self._continued()
                self.estimator.set_params(learning_rate=rate, max_iter=before + self.rounds)
                self.estimator.fit(self.inputs, self.targets, self.row_weights)
        except ValueError as error:
            raise self.refused(error) from error
        trees = [each for turn in self.estimator._predictors[before:] for each in turn]
        return _packed(
            {
                "nodes": np.concatenate([each.nodes for each in trees]),
                "sizes": np.array([len(each.nodes) for each in trees]),
                "raw": np.concatenate([each.raw_left_cat_bitsets for each in trees]),
                "binned": np.concatenate([each.binned_left_cat_bitsets for each in trees]),
                "splits": np.array([len(each.raw_left_cat_bitsets) for each in trees]),
            }
        )

    def _continued(self) -> Any:
        """Return the estimator as it was after the steps so far."""
        from sklearn import ensemble
        from sklearn.ensemble._hist_gradient_boosting.predictor import TreePredictor

        name = "HistGradientBoosting" + ("Classifier" if self.labels else "Regressor")
        result = getattr(ensemble, name)(
            **self.given,
            max_iter=1,
            early_stopping=False,
            warm_start=True,
            random_state=self.seed,
            monotonic_cst=self.monotone[self.order] if self.monotone.any() else None,
            categorical_features=list(range(len(self.preparation.categories))),
        )
        if self.parts:
            result.fit(self.inputs, self.targets, self.row_weights)
            trees = [TreePredictor(*tree) for part in self.parts for tree in _trees_of(part)]
            wide = len(result._predictors[0])
            result._predictors = [
                trees[first : first + wide] for first in range(0, len(trees), wide)
            ]
        return result

    def trees(self, part: bytes) -> Trees:
        return joined([self._arrays(nodes, raw) for nodes, _, raw in _trees_of(part)])

    def _arrays(self, nodes: Any, bitsets: Any) -> Trees:
        inner = nodes["is_leaf"] == 0
        return Trees(
            feature=np.where(inner, self.order[nodes["feature_idx"]], -1).astype(np.int32),
            threshold=nodes["num_threshold"],
            left=nodes["left"].astype(np.int32),
            right=nodes["right"].astype(np.int32),
            missing_left=nodes["missing_go_to_left"].astype(bool),
            value=nodes["value"],
            roots=np.zeros(1, np.int32),
            bitset=np.where(nodes["is_categorical"] > 0, nodes["bitset_idx"], -1).astype(np.int32),
            bitsets=bitsets,
            single=np.array(False),
        )

    def model(self) -> TableModel:
        whole = joined([self.trees(part) for part in self.parts])
        return TreesModel(*self.shared(), **whole.arrays)


def _trees_of(part: bytes) -> Iterator[tuple[Any, Any, Any]]:
    """Yield the nodes of each tree, and its categories as bins and as they are."""
    stored = _unpacked(part)
    nodes = np.split(stored["nodes"], np.cumsum(stored["sizes"])[:-1])
    splits = np.cumsum(stored["splits"])[:-1]
    return zip(
        nodes, np.split(stored["binned"], splits), np.split(stored["raw"], splits), strict=True
    )
