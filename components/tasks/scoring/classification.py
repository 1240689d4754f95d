"""Score a classifier on the test side, and a baseline that predicts the most common label."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch

from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.errors import DataError
from steadytrain.components.shared.records import DataRecord
from steadytrain.components.tasks.base import Components
from steadytrain.components.tasks.scoring.class_balance import class_counts
from steadytrain.components.tasks.scoring.table import (
    longest,
    pad,
    padding_id,
    score_table,
)

_RECORDS_AT_ONCE = 2048


class ClassificationScorer:
    """Scores a classifier of texts."""

    def __init__(self, config: RunConfig, data: DataRecord) -> None:
        self.config, self.data = config, data

    def score(self, components: Components, records: pa.Table) -> pa.Table:
        return score_classification(
            components,
            records,
            labels=self.data.labels,
            batch_size=self.config.evaluation.batch_size,
            max_length=self.data.sequence_length,
        )

    def baselines(self, records: pa.Table) -> dict[str, float]:
        return classification_baselines(self.data, records)


def score_classification(
    components: Components,
    records: pa.Table,
    *,
    labels: Sequence[str],
    batch_size: int,
    max_length: int,
) -> pa.Table:
    """Score each record.

    Args:
        components: "model" and "tokenizer".
        records: `id`, `text` and `label`.
        labels: classes, in the order of the model's outputs.
        batch_size: texts per forward pass.
        max_length: maximum tokens per text; longer texts are truncated.

    Returns:
        The columns of `Scorer.score`. `bytes` is 0, because no text is predicted.
    """
    model, tokenizer = components["model"], components["tokenizer"]
    model.eval()
    length = longest(model, max_length)
    texts: list[Any] = records.column("text").to_pylist()
    parts = [
        _log_chances(model, tokenizer, texts[start : start + _RECORDS_AT_ONCE], batch_size, length)
        for start in range(0, len(texts), _RECORDS_AT_ONCE)
    ]
    log_chances = np.concatenate([np.zeros((0, len(labels))), *parts])
    truth = label_indices(records, labels)
    return score_table(
        records,
        {
            "loss": -log_chances[np.arange(len(truth)), truth],
            "targets": np.ones(len(truth), dtype=np.int64),
            "bytes": np.zeros(len(truth), dtype=np.int64),
            "label": truth,
            "prediction": log_chances.argmax(axis=1),
            "probabilities": list(np.exp(log_chances).astype(np.float32)),
        },
    )


def classification_baselines(data: DataRecord, records: pa.Table) -> dict[str, float]:
    """Score always predicting the most common label of the training side.

    Returns:
        `accuracy`.
    """
    counts = class_counts(data)
    truth = label_indices(records, data.labels)
    return {"accuracy": float((truth == np.argmax(counts)).mean())} if len(truth) else {}


def label_indices(records: pa.Table, labels: Sequence[str]) -> npt.NDArray[np.int64]:
    """Return the class of each record.

    Raises:
        DataError: the model does not have one of the labels.
    """
    known = {label: index for index, label in enumerate(labels)}
    found: list[Any] = records.column("label").to_pylist()
    unknown = sorted({str(label) for label in found if label not in known})
    if unknown:
        raise DataError(
            f"test side: label {unknown[0]!r} is not one of {', '.join(labels)}",
            remedy="set data.labels to all labels that may occur, and prepare the data again",
        )
    return np.array([known[label] for label in found], dtype=np.int64)


def _log_chances(
    model: torch.nn.Module, tokenizer: Any, texts: list[str], batch_size: int, length: int
) -> npt.NDArray[np.float64]:
    """Return the log-probabilities (texts, classes), in the order of the texts."""
    encoded = tokenizer(texts, truncation=True, max_length=length)["input_ids"]
    order = sorted(range(len(texts)), key=lambda index: len(encoded[index]), reverse=True)
    parts = [
        _forward(model, [encoded[index] for index in order[start : start + batch_size]], tokenizer)
        for start in range(0, len(order), batch_size)
    ]
    ordered = np.concatenate(parts)
    found = np.empty_like(ordered)
    found[order] = ordered
    return found


@torch.inference_mode()
def _forward(
    model: torch.nn.Module, rows: list[list[int]], tokenizer: Any
) -> npt.NDArray[np.float64]:
    device = next(model.parameters()).device
    ids, mask = pad(rows, padding_id(tokenizer))
    logits = model(input_ids=ids.to(device), attention_mask=mask.to(device)).logits
    log_chances: npt.NDArray[np.float64] = logits.double().log_softmax(dim=-1).cpu().numpy()
    return log_chances
