"""Boosted trees by LightGBM."""

from __future__ import annotations

from typing import Any

from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.records import DataRecord
from steadytrain.components.tabular.learners.base import Array, TreesLearner
from steadytrain.components.tabular.model import LightGBMModel, TableModel
from steadytrain.components.train.framework import lightgbm as shared_trees


class LightGBMLearner(TreesLearner):
    """Each step begins from the raw outputs of the trees before it."""

    model_type = "lightgbm"
    libraries = ("lightgbm",)
    needs_classes = False
    settings = (
        *shared_trees.SETTINGS,
        *("rounds_per_step", "cat_smooth", "cat_l2", "min_data_per_group", "max_cat_threshold"),
        "monotone",
    )

    def __init__(self, config: RunConfig, data: DataRecord) -> None:
        self.binned: Any = None
        super().__init__(config, data)

    def next_part(self, rate: float) -> bytes:
        import lightgbm

        settings = {
            **self.given,
            "objective": self._objective(),
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

    def _objective(self) -> str:
        if not self.labels:
            return "regression"
        return "binary" if self.outputs == 1 else "multiclass"

    def added(self, part: bytes, *matrices: Array) -> tuple[int, list[Array]]:
        return shared_trees.added(part, self.threads, *matrices)

    def model(self) -> TableModel:
        booster = shared_trees.merged([part.decode() for part in self.parts])
        return LightGBMModel(self.preparation, self.labels, self.base(), booster=booster)
