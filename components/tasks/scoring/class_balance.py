"""The classes of the training side: how many examples each has, and what they weigh."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch

from steadytrain.components.shared.class_names import part_indices
from steadytrain.components.shared.config.data import MULTI_TASK
from steadytrain.components.shared.records import DataRecord, Side
from steadytrain.components.tasks.checks import check_class_weights
from steadytrain.components.tasks.scoring.table import read_batches
from steadytrain.components.techniques.rare_classes import ClassWeightsConfig


def class_counts(data: DataRecord, side: Side = "train") -> npt.NDArray[np.int64]:
    """Return the number of examples of each label, of which an example may have several."""
    counts = np.zeros(len(data.labels), dtype=np.int64)
    for batch in read_batches(data, side, ["label"]):
        labels = batch.column("label")
        if pa.types.is_list(labels.type):
            labels = labels.flatten()
        counts += np.bincount(labels.to_numpy(), minlength=len(counts))
    return counts


def class_weights(settings: ClassWeightsConfig, data: DataRecord) -> torch.Tensor | None:
    """Return the weight of each class, (classes), float32; None if all weigh the same.

    Raises:
        BadInput: the given weights are not those of the labels.
    """
    if settings.kind == "balanced":
        return torch.from_numpy(_balanced(class_counts(data), data))
    if settings.kind == "given":
        check_class_weights(settings, data.labels)
        return torch.tensor([settings.given[label] for label in data.labels])
    return None


def _balanced(counts: npt.NDArray[np.int64], data: DataRecord) -> npt.NDArray[np.float32]:
    """Return weights that average to 1 over the examples; with several data sets, of each one.

    Args:
        counts: examples of each class.
    """
    owners = part_indices(data.labels)[1] if data.task == MULTI_TASK else [0] * len(counts)
    weights = np.zeros(len(counts), dtype=np.float32)
    for owner in set(owners):
        # A class without examples is never a target.
        mine = (np.asarray(owners) == owner) & (counts > 0)
        weights[mine] = counts[mine].sum() / (mine.sum() * np.maximum(counts[mine], 1))
    return weights
