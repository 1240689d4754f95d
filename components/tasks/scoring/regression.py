"""Score predicted numbers on the test side, and the middle of the training side as the baseline."""

from __future__ import annotations

from functools import cached_property

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch

from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.records import DataRecord
from steadytrain.components.tasks.base import Components
from steadytrain.components.tasks.scoring.table import score_table, training_numbers
from steadytrain.components.tasks.scoring.whole_texts import Attacking, head_answers
from steadytrain.components.techniques.adversarial_training import Attack


class RegressionScorer:
    """Scores predicted numbers. The loss is the squared error relative to the training variance."""

    def __init__(self, config: RunConfig, data: DataRecord) -> None:
        self.config, self.data = config, data

    @cached_property
    def seen(self) -> npt.NDArray[np.float64]:
        """The numbers of the training side."""
        return training_numbers(self.data)

    def score(self, components: Components, records: pa.Table) -> pa.Table:
        return self._score(components, records)

    def score_attacked(self, components: Components, records: pa.Table, attack: Attack) -> pa.Table:
        return self._score(components, records, Attacking(attack, _squared_errors))

    def _score(
        self, components: Components, records: pa.Table, attacking: Attacking | None = None
    ) -> pa.Table:
        truth = _numbers(records)
        found = head_answers(
            components,
            records,
            torch.from_numpy(truth),
            torch.Tensor.double,
            outputs=1,
            batch_size=self.config.evaluation.batch_size,
            max_length=self.data.sequence_length,
            attacking=attacking,
        )
        return self._table(records, truth, found[:, 0], found[:, 0])

    def score_baseline(self, records: pa.Table) -> pa.Table | None:
        """Predict the mean of the training side; for the absolute error its median.

        They are the best constants for squared and for absolute errors.
        """
        truth = _numbers(records)
        if not len(truth):
            return None
        middles = (self.seen.mean(), np.median(self.seen))
        mean, median = (np.full(len(truth), middle) for middle in middles)
        return self._table(records, truth, mean, median)

    def _table(
        self,
        records: pa.Table,
        truth: npt.NDArray[np.float64],
        predicted: npt.NDArray[np.float64],
        middle: npt.NDArray[np.float64],
    ) -> pa.Table:
        """Return the scores.

        Args:
            middle: what the absolute errors are of.
        """
        squared = np.square(predicted - truth)
        return score_table(
            records,
            {
                "loss": squared / self.seen.var(),
                "targets": np.ones(len(truth), dtype=np.int64),
                "bytes": np.zeros(len(truth), dtype=np.int64),
                "target": truth,
                "predicted": predicted,
                "squared_error": squared,
                "absolute_error": np.abs(middle - truth),
            },
        )


def _numbers(records: pa.Table) -> npt.NDArray[np.float64]:
    found: npt.NDArray[np.float64] = records.column("label").to_numpy()
    return found


def _squared_errors(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (logits[:, 0].double() - targets).square().sum()
