"""The numbers of the training side, for tasks that predict a number."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from steadytrain.components.shared.errors import DataError
from steadytrain.components.shared.records import DataRecord
from steadytrain.components.tasks.scoring.table import read_batches


def training_numbers(data: DataRecord) -> npt.NDArray[np.float64]:
    """Return the numbers of the training side, in the order of its rows.

    Raises:
        DataError: they are all the same.
    """
    parts = [batch.column("label").to_numpy() for batch in read_batches(data, "train", ["label"])]
    found: npt.NDArray[np.float64] = np.concatenate(parts)
    if (found == found[0]).all():
        raise DataError(
            f"each record of the training side has the number {found[0]:g}, so that there is "
            "nothing to learn",
            remedy="give records with different numbers, or check data.columns.label",
        )
    return found
