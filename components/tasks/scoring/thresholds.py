"""From which probability on a model predicts a label, if a text can have several.

For micro F1, the best predictions of a model have one threshold for all labels, and for macro F1
one for each label (Koyejo et al., Consistent Multilabel Classification, NIPS 2015). They are chosen
on the validation side. The exported model has them in its config.json, so that each model is scored
with its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from steadytrain.components.shared.class_names import listed
from steadytrain.components.shared.config import TrainingConfig
from steadytrain.components.shared.digest import THRESHOLDS
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.shared.records import DataRecord
from steadytrain.components.tasks.scoring.table import class_counts

FIELD: Final = THRESHOLDS
"""In config.json: the threshold of each label. Without it, all are HALF."""
HALF: Final = 0.5
LEAST: Final = 10
"""Validation records with a label that the choice of its threshold needs."""


def label_losses(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the binary cross-entropy of each row, the mean over its labels, in nats.

    Args:
        logits: (rows, labels), float32.
        targets: (rows, labels), 1 for each label that a row has, otherwise 0.
    """
    return functional.binary_cross_entropy_with_logits(
        logits, targets.to(logits.dtype), reduction="none"
    ).mean(1)


def best_thresholds(
    truth: npt.NDArray[np.bool_], probabilities: npt.NDArray[np.float64], *, shared: bool
) -> list[float]:
    """Return the threshold of each label with the best F1; HALF for a label with few records.

    Args:
        truth, probabilities: (records, labels).
        shared: return the same threshold for all labels, the one with the best micro F1.
    """
    if shared:
        return [_best_threshold(truth.ravel(), probabilities.ravel())] * truth.shape[1]
    return [
        _best_threshold(mine, chances) if mine.sum() >= LEAST else HALF
        for mine, chances in zip(truth.T, probabilities.T, strict=True)
    ]


def _best_threshold(truth: npt.NDArray[np.bool_], probabilities: npt.NDArray[np.float64]) -> float:
    order = np.argsort(-probabilities, kind="stable")
    ordered = probabilities[order]
    # Records with equal probabilities are all predicted, or none is.
    ends = np.flatnonzero(np.diff(ordered, append=-1.0))
    scores = 2 * np.cumsum(truth[order])[ends] / (ends + 1 + truth.sum())
    between = (ordered[ends] + np.append(ordered[1:], 0.0)[ends]) / 2
    best = between[scores == scores.max()]
    return float(best[np.abs(best - HALF).argmin()])


def thresholds_of(model: Any, labels: Sequence[str]) -> npt.NDArray[np.float64]:
    """Return the threshold of each label, as recorded in a model's configuration.

    Raises:
        BadInput: the field has an invalid value.
    """
    found = getattr(model.config, FIELD, {})
    if not isinstance(found, Mapping) or not all(_is_share(item) for item in found.values()):
        raise BadInput(
            f"{FIELD} in the model's config.json is {str(found)[:80]!r}, not a number from 0 to 1 "
            "for each label",
            remedy="restore that field: steadytrain wrote it when it trained the model",
        )
    return np.array([found.get(label, HALF) for label in labels], dtype=np.float64)


def without_thresholds(model: torch.nn.Module) -> torch.nn.Module:
    """Remove the thresholds of the model that training starts from."""
    config: Any = model.config
    if hasattr(config, FIELD):
        delattr(config, FIELD)
    return model


def fixed_labels(training: TrainingConfig, data: DataRecord) -> str:
    """Return which labels have too few validation records to choose a threshold, or ""."""
    if training.label_thresholds != "per_label":
        return ""
    few = np.flatnonzero(class_counts(data, "validation") < LEAST)
    if not len(few):
        return ""
    names = listed([data.labels[index] for index in few])
    return (
        f"fewer than {LEAST} validation records have the {'label' if len(few) == 1 else 'labels'} "
        f"{names}: the threshold there stays {HALF}"
    )


def _is_share(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1
