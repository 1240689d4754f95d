"""Score a classifier on the test side, and the frequencies of the classes as its baseline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
from torch.nn import functional

from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.config.adversarial import Attack
from steadytrain.components.shared.errors import DataError
from steadytrain.components.shared.records import DataRecord
from steadytrain.components.tasks.attack import perturbed, search
from steadytrain.components.tasks.base import Batch, Components
from steadytrain.components.tasks.device import to_device
from steadytrain.components.tasks.encoding.labeled_text import PAIR, pair_tokens
from steadytrain.components.tasks.fitting import batched
from steadytrain.components.tasks.scoring.class_balance import class_counts
from steadytrain.components.tasks.scoring.table import (
    longest,
    pad,
    padding_id,
    score_table,
    token_types,
)

_RECORDS_AT_ONCE = 2048


class ClassificationScorer:
    """Scores a classifier of texts."""

    def __init__(self, config: RunConfig, data: DataRecord) -> None:
        self.config, self.data = config, data

    def score(self, components: Components, records: pa.Table) -> pa.Table:
        return self._score(components, records)

    def score_attacked(self, components: Components, records: pa.Table, attack: Attack) -> pa.Table:
        return self._score(components, records, attack)

    def _score(
        self, components: Components, records: pa.Table, attack: Attack | None = None
    ) -> pa.Table:
        return score_classification(
            components,
            records,
            labels=self.data.labels,
            batch_size=self.config.evaluation.batch_size,
            max_length=self.data.sequence_length,
            attack=attack,
        )

    def score_baseline(self, records: pa.Table) -> pa.Table | None:
        return score_class_frequencies(self.data, records)


def score_classification(
    components: Components,
    records: pa.Table,
    *,
    labels: Sequence[str],
    batch_size: int,
    max_length: int,
    attack: Attack | None = None,
    together: npt.NDArray[np.bool_] | None = None,
) -> pa.Table:
    """Score each record.

    Args:
        components: "model" and "tokenizer".
        records: `id`, `text` and `label`; with pairs of texts also `text_pair`.
        labels: classes, in the order of the model's outputs.
        batch_size: texts per forward pass.
        max_length: maximum tokens per text; longer texts are truncated.
        attack: perturbs the embeddings of each text.
        together: (classes, classes), whether two classes are alternatives. None: all are.

    Returns:
        The columns of `Scorer.score`. `bytes` is 0, because no text is predicted.
    """
    model, tokenizer = components["model"], components["tokenizer"]
    model.eval()
    length = longest(model, max_length)
    texts: list[Any] = records.column("text").to_pylist()
    if PAIR in records.column_names:
        texts = [*zip(texts, records.column(PAIR).to_pylist(), strict=True)]
    truth = label_indices(records, labels)
    attacking = None if attack is None else _Attacking(attack, together)
    parts = []
    for start in range(0, len(texts), _RECORDS_AT_ONCE):
        place = slice(start, start + _RECORDS_AT_ONCE)
        classified = _Texts(texts[place], truth[place])
        parts.append(_log_chances(model, tokenizer, classified, batch_size, length, attacking))
    log_chances = np.concatenate([np.zeros((0, len(labels))), *parts])
    if together is not None:
        log_chances = among(log_chances, truth, together)
    return class_scores(records, truth, log_chances)


def class_scores(
    records: pa.Table, truth: npt.NDArray[np.int64], log_chances: npt.NDArray[np.float64]
) -> pa.Table:
    """Return the scores of predictions.

    Args:
        truth: (records,), each one's class.
        log_chances: (records, classes), the log-probabilities.
    """
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


def score_class_frequencies(
    data: DataRecord, records: pa.Table, together: npt.NDArray[np.bool_] | None = None
) -> pa.Table | None:
    """Score each record, but predict each class by its frequency alone, so always the same one.

    The frequencies are those of the training side, with add-one smoothing.

    Args:
        together: as for `score_classification`.

    Returns:
        None without records.
    """
    truth = label_indices(records, data.labels)
    if not len(truth):
        return None
    log_chances = np.tile(np.log(class_counts(data) + 1.0), (len(truth), 1))
    return class_scores(records, truth, among(log_chances, truth, together))


def among(
    log_chances: npt.NDArray[np.float64],
    truth: npt.NDArray[np.int64],
    together: npt.NDArray[np.bool_] | None,
) -> npt.NDArray[np.float64]:
    """Normalize log-probabilities over the classes that are alternatives to each record's own."""
    if together is not None:
        log_chances = np.where(together[truth], log_chances, -np.inf)
    normalized: npt.NDArray[np.float64] = log_chances - np.logaddexp.reduce(
        log_chances, axis=1, keepdims=True
    )
    return normalized


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


@dataclass(frozen=True)
class _Texts:
    """Texts or pairs of them, and their classes."""

    texts: list[Any]
    truth: npt.NDArray[np.int64]


@dataclass(frozen=True)
class _Attacking:
    """An attack on the loss of texts among the classes that are alternatives to their own.

    together: as for `score_classification`.
    """

    attack: Attack
    together: npt.NDArray[np.bool_] | None

    def loss(self, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        logits, targets = _logits(model, batch).float(), batch["targets"]
        if self.together is not None:
            own = torch.from_numpy(self.together).to(targets.device)[targets]
            logits = logits.masked_fill(~own, -torch.inf)
        return functional.cross_entropy(logits, targets, reduction="sum")


def _log_chances(
    model: torch.nn.Module,
    tokenizer: Any,
    given: _Texts,
    batch_size: int,
    length: int,
    attacking: _Attacking | None,
) -> npt.NDArray[np.float64]:
    """Return the log-probabilities (texts, classes), in the order of the texts."""
    if given.texts and isinstance(given.texts[0], tuple):
        encoded, types = map(list, zip(*pair_tokens(tokenizer, given.texts, length), strict=True))
    else:
        encoded, types = tokenizer(given.texts, truncation=True, max_length=length)["input_ids"], []
    order = sorted(range(len(encoded)), key=lambda index: len(encoded[index]), reverse=True)
    device, fill = next(model.parameters()).device, padding_id(tokenizer)

    def classify(rows: Sequence[int]) -> list[npt.NDArray[np.float64]]:
        ids, mask = pad([encoded[index] for index in rows], fill)
        targets = torch.from_numpy(given.truth[list(rows)])
        batch = {"input_ids": ids, "attention_mask": mask, "targets": targets}
        if types:
            batch |= token_types([types[index] for index in rows], ids.shape[1])
        return list(_forward(model, to_device(batch, device), attacking))

    ordered = np.stack(batched(classify, order, batch_size, lambda index: len(encoded[index])))
    found = np.empty_like(ordered)
    found[order] = ordered
    return found


def _forward(
    model: torch.nn.Module, batch: Batch, attacking: _Attacking | None
) -> npt.NDArray[np.float64]:
    if attacking is None:
        return _classified(model, batch)
    worst = search(model, batch, attacking.attack, lambda: attacking.loss(model, batch))
    with perturbed(model, worst.detach()):
        return _classified(model, batch)


@torch.inference_mode()
def _classified(model: torch.nn.Module, batch: Batch) -> npt.NDArray[np.float64]:
    log_chances: npt.NDArray[np.float64] = (
        _logits(model, batch).double().log_softmax(dim=-1).cpu().numpy()
    )
    return log_chances


def _logits(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    inputs = {name: value for name, value in batch.items() if name != "targets"}
    logits: torch.Tensor = model(**inputs).logits
    return logits
