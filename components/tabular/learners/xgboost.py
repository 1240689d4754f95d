"""Boosted trees by XGBoost."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.records import DataRecord
from steadytrain.components.tabular.learners.base import Array, TreesLearner
from steadytrain.components.tabular.model import TableModel, XGBoostModel


class XGBoostLearner(TreesLearner):
    """Each step begins from the raw outputs of the trees before it."""

    model_type = "xgboost"
    libraries = ("xgboost",)
    needs_classes = False
    settings = (
        *("rounds_per_step", "max_depth", "max_leaves", "grow_policy", "min_child_weight"),
        *("gamma", "lambda", "alpha", "subsample", "colsample_bytree", "colsample_bylevel"),
        *("colsample_bynode", "max_bin", "max_delta_step", "max_cat_to_onehot"),
        *("max_cat_threshold", "monotone"),
    )

    def __init__(self, config: RunConfig, data: DataRecord) -> None:
        self.binned: Any = None
        super().__init__(config, data)

    def next_part(self, rate: float) -> bytes:
        import xgboost

        settings = {
            **self.given,
            "objective": self._objective(),
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

    def _objective(self) -> str:
        if not self.labels:
            return "reg:squarederror"
        return "binary:logistic" if self.outputs == 1 else "multi:softprob"

    def added(self, part: bytes, *matrices: Array) -> tuple[int, list[Array]]:
        booster = _booster(part, self.threads)
        leaves = sum(tree.count("leaf=") for tree in booster.get_dump())
        shared = self.preparation, self.labels, [0.0] * self.outputs
        model = XGBoostModel(*shared, booster=booster)
        return leaves, [model.raw(matrix) for matrix in matrices]

    def model(self) -> TableModel:
        whole = _booster(merged(self.parts), self.threads)
        return XGBoostModel(self.preparation, self.labels, self.base(), booster=whole)


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
        model["iteration_indptr"] += [first + place for place in each["iteration_indptr"][1:]]
    model["gbtree_model_param"]["num_trees"] = str(len(model["trees"]))
    return json.dumps(whole).encode()


def _trees_of(content: Any) -> Any:
    return content["learner"]["gradient_booster"]["model"]
