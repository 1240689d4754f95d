"""Score a classifier of several data sets on the test side, each text within its own part."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from steadytrain.components.shared.config.adversarial import Attack
from steadytrain.components.shared.parts import part_indices
from steadytrain.components.tasks.base import Components
from steadytrain.components.tasks.scoring.classification import (
    ClassificationScorer,
    score_class_frequencies,
    score_classification,
)


class MultiTaskScorer(ClassificationScorer):
    """Scores a classifier with a head for each part."""

    def _score(
        self, components: Components, records: pa.Table, attack: Attack | None = None
    ) -> pa.Table:
        scores = score_classification(
            components,
            records,
            labels=self.data.labels,
            batch_size=self.config.evaluation.batch_size,
            max_length=self.data.sequence_length,
            attack=attack,
            together=self._together(),
        )
        return self._with_parts(scores)

    def score_baseline(self, records: pa.Table) -> pa.Table | None:
        """Predict each class by its frequency among those of its part."""
        scores = score_class_frequencies(self.data, records, self._together())
        return None if scores is None else self._with_parts(scores)

    def _with_parts(self, scores: pa.Table) -> pa.Table:
        owners = np.asarray(part_indices(self.data.labels)[1])
        return scores.append_column("part", pa.array(owners[scores.column("label").to_numpy()]))

    def _together(self) -> npt.NDArray[np.bool_]:
        owners = np.asarray(part_indices(self.data.labels)[1])
        together: npt.NDArray[np.bool_] = owners[:, None] == owners
        return together
