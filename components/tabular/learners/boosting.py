"""Boosted trees by CatBoost, LightGBM and XGBoost."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Final

import numpy as np

from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.shared.records import DataRecord
from steadytrain.components.tabular.learners.base import Array, TreesLearner
from steadytrain.components.tabular.model import (
    CatBoostModel,
    LightGBMModel,
    TableModel,
    XGBoostModel,
    filled,
)
from steadytrain.components.train.framework import LearnerTrainer
from steadytrain.components.train.framework import lightgbm as shared_trees


class BoostingLearner(TreesLearner):
    """Each step begins from the raw outputs of the trees before it.

    objectives: the library's names of the loss, for numbers, two classes and several.
    binned: the training side as the library holds it, made at the first step.
    fill: as for `BoostedModel`.
    """

    objectives: ClassVar[tuple[str, str, str]]
    binned: Any = None

    def __init__(self, config: RunConfig, data: DataRecord) -> None:
        super().__init__(config, data)
        matrix = self.matrix
        self.fill = np.full(matrix.shape[1], math.nan)
        whole = ~np.isnan(matrix).any(axis=0)
        # A category that is missing is one that training did not see, which trees tell apart.
        whole[self.preparation.categories] = False
        if len(matrix):
            self.fill[whole] = np.median(matrix[:, whole], axis=0)
        self.held_out_matrix = filled(self.held_out_matrix, self.fill)

    @property
    def objective(self) -> str:
        """The library's name of the loss that is learned."""
        numbers, two, several = self.objectives
        if not self.labels:
            return numbers
        return two if self.outputs == 1 else several


class XGBoostLearner(BoostingLearner):
    """Boosted trees of XGBoost."""

    model_type = "xgboost"
    libraries = ("xgboost",)
    objectives = ("reg:squarederror", "binary:logistic", "multi:softprob")
    needs_classes = False
    settings = (
        *("rounds_per_step", "max_depth", "max_leaves", "grow_policy", "min_child_weight"),
        *("gamma", "lambda", "alpha", "subsample", "colsample_bytree", "colsample_bylevel"),
        *("colsample_bynode", "max_bin", "max_delta_step", "max_cat_to_onehot"),
        *("max_cat_threshold", "monotone"),
    )

    def next_part(self, rate: float) -> bytes:
        import xgboost

        settings = {
            **self.given,
            "objective": self.objective,
            "learning_rate": rate,
            # So that outputs without margins start from 0.
            "base_score": 0.5 if self.labels and self.outputs == 1 else 0.0,
            "nthread": self.threads,
            "seed": self.seed + len(self.parts),
            "tree_method": "hist",
            "verbosity": 0,
        }
        if self.monotone.any():
            settings["monotone_constraints"] = tuple(self.monotone.tolist())
        if self.outputs > 1:
            settings["num_class"] = self.outputs
        try:
            if self.binned is None:
                # XGBoost bins it once.
                self.binned = self.preparation.xgboost_matrix(self.matrix, self.threads)
                self.binned.set_info(label=self.targets, weight=self.row_weights)
            self.binned.set_base_margin(self.raw)
            booster = xgboost.train(settings, self.binned, num_boost_round=self.rounds)
        except ValueError as error:
            raise self.refused(error) from error
        return bytes(booster.save_raw("json"))

    def added(self, part: bytes, *matrices: Array) -> tuple[int, list[Array]]:
        booster = _booster(part, self.threads)
        leaves = sum(tree.count("leaf=") for tree in booster.get_dump())
        shared = self.preparation, self.labels, [0.0] * self.outputs
        model = XGBoostModel(*shared, booster=booster)
        return leaves, [model.raw(matrix) for matrix in matrices]

    def model(self) -> TableModel:
        whole = _booster(merged(self.parts), self.threads)
        shared = self.preparation, self.labels, self.base()
        return XGBoostModel(*shared, booster=whole, fill=self.fill)


def _booster(content: bytes, threads: int) -> Any:
    import xgboost

    return xgboost.Booster({"nthread": threads}, model_file=bytearray(content))


def merged(parts: Sequence[bytes]) -> bytes:
    """Return one model in JSON with the trees of several, in their order."""
    whole, *others = [json.loads(part) for part in parts]
    model = _trees_of(whole)
    for each in map(_trees_of, others):
        first = len(model["trees"])
        model["trees"] += [{**tree, "id": first + tree["id"]} for tree in each["trees"]]
        model["tree_info"] += each["tree_info"]
        model["iteration_indptr"] += [first + index for index in each["iteration_indptr"][1:]]
    model["gbtree_model_param"]["num_trees"] = str(len(model["trees"]))
    return json.dumps(whole).encode()


def _trees_of(content: Any) -> Any:
    return content["learner"]["gradient_booster"]["model"]


class LightGBMLearner(BoostingLearner):
    """Boosted trees of LightGBM."""

    model_type = "lightgbm"
    libraries = ("lightgbm",)
    objectives = ("regression", "binary", "multiclass")
    needs_classes = False
    settings = (
        *shared_trees.SETTINGS,
        *("rounds_per_step", "cat_smooth", "cat_l2", "min_data_per_group", "max_cat_threshold"),
        "monotone",
    )

    def _check_settings(self) -> None:
        super()._check_settings()
        linear = self.given.get("linear_tree", False)
        # Its documentation: constraints choose the splits, and leaves are fitted without them.
        if self.given.get("monotone") and str(linear).lower() not in ("false", "-"):
            raise BadInput(
                f"model.config.linear_tree = {linear!r}: in linear leaves, LightGBM does not keep "
                "outputs monotone, as model.config.monotone asks",
                remedy="leave one of the two out",
            )

    def next_part(self, rate: float) -> bytes:
        import lightgbm

        settings = {
            **self.given,
            "objective": self.objective,
            **shared_trees.exact(
                seed=self.seed, step=len(self.parts), rate=rate, threads=self.threads
            ),
        }
        if self.monotone.any():
            settings["monotone_constraints"] = self.monotone.tolist()
        if self.outputs > 1:
            settings["num_class"] = self.outputs
        try:
            if self.binned is None:
                # Once, because binning takes longer than the trees of a step.
                self.binned = lightgbm.Dataset(
                    self.matrix,
                    self.targets,
                    weight=self.row_weights,
                    categorical_feature=self.preparation.categories,
                    params=settings,
                    free_raw_data=False,
                ).construct()
            return shared_trees.next_trees(settings, self.binned, self.raw, self.rounds)
        except lightgbm.basic.LightGBMError as error:
            raise self.refused(error) from error

    def added(self, part: bytes, *matrices: Array) -> tuple[int, list[Array]]:
        return shared_trees.added(part, self.threads, *matrices)

    def model(self) -> TableModel:
        booster = shared_trees.merged([part.decode() for part in self.parts])
        shared = self.preparation, self.labels, self.base()
        return LightGBMModel(*shared, booster=booster, fill=self.fill)


class CatBoostLearner(BoostingLearner):
    """Boosted trees of CatBoost."""

    model_type = "catboost"
    libraries = ("catboost",)
    objectives = ("RMSE", "Logloss", "MultiClass")
    settings = (
        *("rounds_per_step", "depth", "max_leaves", "min_data_in_leaf", "grow_policy"),
        *("l2_leaf_reg", "random_strength", "bootstrap_type", "bagging_temperature", "subsample"),
        *("rsm", "border_count", "one_hot_max_size", "max_ctr_complexity", "model_size_reg"),
        *("leaf_estimation_iterations", "score_function", "monotone"),
    )

    def next_part(self, rate: float) -> bytes:
        import catboost

        settings = {
            **self.given,
            "loss_function": self.objective,
            "iterations": self.rounds,
            "learning_rate": rate,
            "random_seed": self.seed + len(self.parts),
            "thread_count": self.threads,
            "boost_from_average": False,
            "allow_writing_files": False,
            "logging_level": "Silent",
        }
        if self.monotone.any():
            settings["monotone_constraints"] = self.monotone.tolist()
        if self.outputs > 1:
            settings["classes_count"] = self.outputs
            del settings["boost_from_average"]
        try:
            if self.binned is None:
                self.binned = catboost.Pool(
                    self.preparation.frame(self.matrix),
                    self.targets,
                    weight=self.row_weights,
                    cat_features=self.preparation.categories,
                    thread_count=self.threads,
                )
            self.binned.set_baseline(self.raw)
            fitted = catboost.CatBoost(settings).fit(self.binned)
        except catboost.CatBoostError as error:
            raise self.refused(error) from error
        with tempfile.TemporaryDirectory() as scratch:
            file = Path(scratch) / "model.cbm"
            fitted.save_model(str(file))
            return file.read_bytes()

    def added(self, part: bytes, *matrices: Array) -> tuple[int, list[Array]]:
        import catboost

        fitted = catboost.CatBoost().load_model(blob=part)
        raw = [
            np.asarray(
                fitted.predict(
                    self.preparation.frame(matrix),
                    prediction_type="RawFormulaVal",
                    thread_count=self.threads,
                ),
                np.float64,
            ).reshape(-1, self.outputs)
            if len(matrix)
            else np.zeros((0, self.outputs))
            for matrix in matrices
        ]
        return int(fitted.get_tree_leaf_counts().sum()), raw

    def model(self) -> TableModel:
        import catboost

        parts = [_loaded(part) for part in self.parts]
        whole = catboost.sum_models(parts) if len(parts) > 1 else parts[0]
        shared = self.preparation, self.labels, self.base()
        return CatBoostModel(*shared, booster=whole, fill=self.fill)


def _loaded(part: bytes) -> Any:
    """Return a model that owns its memory.

    One that is loaded with `blob` (CatBoost 1.2.10) reads the statistics of categories from these
    bytes for as long as it lives. Once they are gone, it predicts something else or never returns.
    """
    import catboost

    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "model.cbm"
        file.write_bytes(part)
        return catboost.CatBoost().load_model(str(file))


CATBOOST: Final = LearnerTrainer(CatBoostLearner)
LIGHTGBM: Final = LearnerTrainer(LightGBMLearner)
XGBOOST: Final = LearnerTrainer(XGBoostLearner)
