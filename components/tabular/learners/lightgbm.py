"""Boosted trees by LightGBM."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.records import DataRecord
from steadytrain.components.tabular.learners.base import Array, TreesLearner
from steadytrain.components.tabular.model import LightGBMModel, TableModel


class LightGBMLearner(TreesLearner):
    """Each step begins from the raw outputs of the trees before it."""

    model_type = "lightgbm"
    libraries = ("lightgbm",)
    needs_classes = False
    settings = (
        *("rounds_per_step", "num_leaves", "max_depth", "min_data_in_leaf", "max_bin"),
        *("lambda_l1", "lambda_l2", "min_gain_to_split", "bagging_fraction", "bagging_freq"),
        *("feature_fraction", "extra_trees", "cat_smooth", "cat_l2", "min_data_per_group"),
        "monotone",
        *("path_smooth", "linear_tree", "max_cat_threshold", "min_sum_hessian_in_leaf"),
    )

    def __init__(self, config: RunConfig, data: DataRecord) -> None:
        self.binned: Any = None
        super().__init__(config, data)

    def next_part(self, rate: float) -> bytes:
        import lightgbm

        settings = {
            **self.given,
            "objective": self._objective(),
            "learning_rate": rate,
            "num_threads": self.threads,
            "seed": self.seed + len(self.parts),
            "data_random_seed": self.seed,
            "deterministic": True,
            "force_row_wise": True,
            "boost_from_average": False,
            "verbosity": -1,
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
            self.binned.set_init_score(self.raw.ravel(order="F"))
            booster = lightgbm.train(settings, self.binned, num_boost_round=self.rounds)
        except lightgbm.basic.LightGBMError as error:
            raise self.refused(error) from error
        text: str = booster.model_to_string()
        return text.encode()

    def _objective(self) -> str:
        if not self.labels:
            return "regression"
        return "binary" if self.outputs == 1 else "multiclass"

    def added(self, part: bytes, *matrices: Array) -> tuple[int, list[Array]]:
        import lightgbm

        # Read again, so that a model from a checkpoint gives the same bits.
        text = part.decode()
        booster = lightgbm.Booster(model_str=text)
        leaves = sum(map(int, re.findall(r"^num_leaves=(\d+)$", text, re.MULTILINE)))
        return leaves, [_raw(booster, matrix, self.threads) for matrix in matrices]

    def model(self) -> TableModel:
        shared = self.preparation, self.labels, self.base()
        return LightGBMModel(*shared, booster=merged([part.decode() for part in self.parts]))


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
