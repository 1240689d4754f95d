"""Score a model that gives a text any number of labels, and constant labels as its baseline.

A model predicts a label from some probability on. For micro F1, the best predictions have one such
threshold for all labels, and for macro F1 one for each label (Koyejo et al., Consistent Multilabel
Classification, NIPS 2015). They are chosen on the validation side. The exported model has them in
its config.json, so that each model is scored with its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
from torch.nn import functional

from steadytrain.components.shared.class_names import listed
from steadytrain.components.shared.config import TrainingConfig
from steadytrain.components.shared.digest import THRESHOLDS
from steadytrain.components.shared.errors import BadInput, DataError
from steadytrain.components.shared.records import DataRecord
from steadytrain.components.tasks.base import Components
from steadytrain.components.tasks.scoring.classification import ClassificationScorer
from steadytrain.components.tasks.scoring.table import class_counts, read_batches, score_table
from steadytrain.components.tasks.scoring.thresholds import HALF, LEAST
from steadytrain.components.tasks.scoring.whole_texts import Attacking, head_answers
from steadytrain.components.techniques.adversarial_training import Attack

_Flags = npt.NDArray[np.bool_]
_Numbers = npt.NDArray[np.float64]


class MultiLabelScorer(ClassificationScorer):
    """Scores a model with an output for each label, each with the thresholds of the model."""

    def _score(
        self, components: Components, records: pa.Table, attack: Attack | None = None
    ) -> pa.Table:
        truth = label_flags(records, self.data.labels)
        logits = head_answers(
            components,
            records,
            torch.from_numpy(truth),
            lambda found: found.double(),
            outputs=len(self.data.labels),
            batch_size=self.config.evaluation.batch_size,
            max_length=self.data.sequence_length,
            attacking=None if attack is None else Attacking(attack, _summed_loss),
        )
        thresholds = thresholds_of(components["model"], self.data.labels)
        probabilities = torch.from_numpy(logits).sigmoid().numpy()
        predicted = probabilities >= thresholds
        return label_scores(records, truth, logits, predicted, thresholds)

    def score_baseline(self, records: pa.Table) -> pa.Table | None:
        return score_label_frequencies(self.data, records, self.config.gate.metric)


def score_label_frequencies(
    data: DataRecord, records: pa.Table, metric: str | None
) -> pa.Table | None:
    """Predict the same labels for each record, and each by its frequency alone.

    They are those with the best value of the gate's metric on the training side. So a model has
    learned something from the records if it is better.

    Args:
        metric: of the gate.

    Returns:
        None without records.
    """
    truth = label_flags(records, data.labels)
    if not len(truth):
        return None
    # With add-one smoothing, as for classes.
    rates = (class_counts(data) + 1) / (data.sides["train"].rows + 2)
    logits = np.tile(np.log(rates) - np.log1p(-rates), (len(truth), 1))
    constant = constant_labels(data, metric)
    # The threshold is what the rate is, or above it.
    thresholds = np.where(constant, rates, 1.0)
    return label_scores(records, truth, logits, np.tile(constant, (len(truth), 1)), thresholds)


def constant_labels(data: DataRecord, metric: str | None) -> _Flags:
    """Return the labels that are best predicted for every record, by the training side.

    Args:
        metric: of the test side, by which they are best; other metrics than those of predictions
            have no preference.
    """
    counts, rows = class_counts(data), data.sides["train"].rows
    if metric == "macro_f1":
        return counts > 0
    if metric == "hamming_loss":
        return counts > rows / 2
    if metric == "subset_accuracy":
        return _most_frequent_set(data)
    order = np.argsort(-counts, kind="stable")
    scores = 2 * np.cumsum(counts[order]) / (counts.sum() + rows * np.arange(1, len(counts) + 1))
    result = np.zeros(len(counts), dtype=np.bool_)
    result[order[: scores.argmax() + 1]] = True
    return result


def _most_frequent_set(data: DataRecord) -> _Flags:
    sets = Counter(
        tuple(labels)
        for batch in read_batches(data, "train", ["label"])
        for labels in batch.column("label").to_pylist()
    )
    most = max(sorted(sets), key=sets.__getitem__)
    result = np.zeros(len(data.labels), dtype=np.bool_)
    result[list(most)] = True
    return result


def label_flags(records: pa.Table, labels: Sequence[str]) -> _Flags:
    """Return which labels each record has, (records, labels).

    Raises:
        DataError: the model does not have one of them.
    """
    known = {label: index for index, label in enumerate(labels)}
    flags = np.zeros((records.num_rows, len(labels)), dtype=np.bool_)
    given: list[Any] = records.column("label").to_pylist()
    for row, names in enumerate(given):
        for name in names:
            if name not in known:
                raise DataError(
                    f"test side: label {name!r} is not one of {', '.join(labels)}",
                    remedy="set data.labels to all labels that may occur, and prepare the data "
                    "again",
                )
            flags[row, known[name]] = True
    return flags


def _summed_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return label_losses(logits.float(), targets).sum()


def label_scores(
    records: pa.Table, truth: _Flags, logits: _Numbers, predicted: _Flags, thresholds: _Numbers
) -> pa.Table:
    """Return the scores of predictions.

    Args:
        truth, logits, predicted: (records, labels).
        thresholds: (labels,).
    """
    scored = torch.from_numpy(logits)
    return score_table(
        records,
        {
            "loss": label_losses(scored, torch.from_numpy(truth)).numpy(),
            "labels": [np.flatnonzero(row) for row in truth],
            "predictions": [np.flatnonzero(row) for row in predicted],
            "probabilities": list(scored.sigmoid().numpy().astype(np.float32)),
            "thresholds": [thresholds] * len(truth),
        },
    )


FIELD: Final = THRESHOLDS
"""In config.json: the threshold of each label. Without it, all are HALF."""


def label_losses(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the binary cross-entropy of each row, the mean over its labels, in nats.

    Args:
        logits: (rows, labels), float32.
        targets: (rows, labels), 1 for each label that a row has, otherwise 0.
    """
    return functional.binary_cross_entropy_with_logits(
        logits, targets.to(logits.dtype), reduction="none"
    ).mean(1)


def thresholds_of(model: Any, labels: Sequence[str]) -> npt.NDArray[np.float64]:
    """Return the threshold of each label, as recorded in a model's configuration.

    Raises:
        BadInput: the field has an invalid value.
    """
    stored = getattr(model.config, FIELD, {})
    if not isinstance(stored, Mapping) or not all(_is_share(item) for item in stored.values()):
        raise BadInput(
            f"{FIELD} in the model's config.json is {str(stored)[:80]!r}, not a number from 0 to 1 "
            "for each label",
            remedy="restore that field: steadytrain wrote it when it trained the model",
        )
    return np.array([stored.get(label, HALF) for label in labels], dtype=np.float64)


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
