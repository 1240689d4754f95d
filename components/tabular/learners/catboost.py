"""Boosted trees by CatBoost."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.records import DataRecord
from steadytrain.components.tabular.learners.base import Array, TreesLearner
from steadytrain.components.tabular.model import CatBoostModel, TableModel


class CatBoostLearner(TreesLearner):
    """Each step begins from the raw outputs of the trees before it."""

    model_type = "catboost"
    libraries = ("catboost",)
    settings = (
        *("rounds_per_step", "depth", "max_leaves", "min_data_in_leaf", "grow_policy"),
        *("l2_leaf_reg", "random_strength", "bootstrap_type", "bagging_temperature", "subsample"),
        *("rsm", "border_count", "one_hot_max_size", "max_ctr_complexity", "model_size_reg"),
        *("leaf_estimation_iterations", "score_function", "monotone"),
    )

    def __init__(self, config: RunConfig, data: DataRecord) -> None:
        self.pool: Any = None
        super().__init__(config, data)

    def next_part(self, rate: float) -> bytes:
        import catboost

        settings = {
            **self.given,
            "loss_function": self._objective(),
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
            if self.pool is None:
                self.pool = catboost.Pool(
                    self.preparation.frame(self.matrix),
                    self.targets,
                    weight=self.row_weights,
                    cat_features=self.preparation.categories,
                    thread_count=self.threads,
                )
            self.pool.set_baseline(self.raw)
            fitted = catboost.CatBoost(settings).fit(self.pool)
        except catboost.CatBoostError as error:
            raise self.refused(error) from error
        with tempfile.TemporaryDirectory() as scratch:
            file = Path(scratch) / "model.cbm"
            fitted.save_model(str(file))
            return file.read_bytes()

    def _objective(self) -> str:
        if not self.labels:
            return "RMSE"
        return "Logloss" if self.outputs == 1 else "MultiClass"

    def added(self, part: bytes, *matrices: Array) -> tuple[int, list[Array]]:
        import catboost

        fitted = catboost.CatBoost().load_model(blob=part)
        found = [
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
        return int(fitted.get_tree_leaf_counts().sum()), found

    def model(self) -> TableModel:
        import catboost

        parts = [_loaded(part) for part in self.parts]
        whole = catboost.sum_models(parts) if len(parts) > 1 else parts[0]
        return CatBoostModel(self.preparation, self.labels, self.base(), booster=whole)


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
