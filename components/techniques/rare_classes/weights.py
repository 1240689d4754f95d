"""What the classes weigh in the loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from steadytrain.components.techniques.rare_classes import ClassWeightsConfig


def class_weights(
    settings: ClassWeightsConfig,
    labels: Sequence[str],
    counts: Callable[[], npt.NDArray[np.int64]],
    owners: Sequence[int] = (),
) -> torch.Tensor | None:
    """Return the weight of each class, (classes), float32; None if all weigh the same.

    Args:
        counts: returns the number of training examples of each class.
        owners: the data set of each class, if there are several.

    Raises:
        BadInput: the given weights are not those of the labels.
    """
    if settings.kind == "balanced":
        return torch.from_numpy(_balanced(counts(), owners or [0] * len(labels)))
    if settings.kind == "given":
        settings.check_labels(labels)
        return torch.tensor([settings.given[label] for label in labels])
    return None


def _balanced(counts: npt.NDArray[np.int64], owners: Sequence[int]) -> npt.NDArray[np.float32]:
    """Return weights that average to 1 over the examples of each data set."""
    weights = np.zeros(len(counts), dtype=np.float32)
    for owner in set(owners):
        # A class without examples is never a target.
        mine = (np.asarray(owners) == owner) & (counts > 0)
        weights[mine] = counts[mine].sum() / (mine.sum() * np.maximum(counts[mine], 1))
    return weights
