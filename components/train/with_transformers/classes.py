"""Texts of one class each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from steadytrain.components.train.with_transformers.common import train
from steadytrain.components.train.with_transformers.texts import Texts


def class_scores(given: Any) -> dict[str, float]:
    """Return accuracy and the mean F1 of the classes that are true or predicted."""
    predicted, true = np.argmax(given.predictions, axis=-1), given.label_ids
    scores = []
    for label in np.union1d(predicted, true):
        hits = np.sum((predicted == label) & (true == label))
        scores.append(2 * hits / (np.sum(predicted == label) + np.sum(true == label)))
    return {"accuracy": float(np.mean(predicted == true)), "macro_f1": float(np.mean(scores))}


class Classes(Texts):
    """A target is the index of a class."""

    problem = "single_label_classification"
    scores = staticmethod(class_scores)

    def targets(self, labels: Sequence[Any]) -> torch.Tensor:
        return torch.tensor(labels)


if __name__ == "__main__":
    train(Classes)
