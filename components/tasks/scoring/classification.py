"""Score a classifier on the test side, and the frequencies of the classes as its baseline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
from torch.nn import functional

from steadytrain.components.shared.class_names import part_indices
from steadytrain.components.shared.errors import DataError
from steadytrain.components.shared.records import DataRecord
from steadytrain.components.tasks.base import Components, Part
from steadytrain.components.tasks.fitting import batched
from steadytrain.components.tasks.scoring.table import class_counts, score_table
from steadytrain.components.tasks.scoring.whole_texts import Attacking, head_answers
from steadytrain.components.techniques.adversarial_training import Attack

T = TypeVar("T")


class ClassScorer(Part):
    """Scores predicted classes. A subclass adds `score`."""

    def score_baseline(self, records: pa.Table) -> pa.Table | None:
        """Predict the shares of the classes on the training side."""
        return score_class_frequencies(self.data, records)

    def _scored(
        self, records: pa.Table, rows: Sequence[T], logits: Callable[[Sequence[T]], torch.Tensor]
    ) -> pa.Table:
        """Return the scores of records, whose rows have these logits: (rows, classes)."""

        @torch.inference_mode()
        def answer(some: Sequence[T]) -> list[Any]:
            return list(logits(some).double().log_softmax(dim=-1).cpu().numpy())

        truth = label_indices(records, self.data.labels)
        answers = batched(answer, rows, self.config.evaluation.batch_size, lambda _: 1)
        return class_scores(records, truth, np.array(answers).reshape(-1, len(self.data.labels)))


class ClassificationScorer(ClassScorer):
    """Scores a classifier of texts."""

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
            alternatives=self._alternatives(),
        )

    def _alternatives(self) -> npt.NDArray[np.bool_] | None:
        """Return whether two classes are alternatives, (classes, classes). None: all are."""
        return None


def score_classification(
    components: Components,
    records: pa.Table,
    *,
    labels: Sequence[str],
    batch_size: int,
    max_length: int,
    attack: Attack | None = None,
    alternatives: npt.NDArray[np.bool_] | None = None,
) -> pa.Table:
    """Score each record.

    Args:
        components: "model" and "tokenizer".
        records: `id`, `text` and `label`; with pairs of texts also `text_pair`.
        labels: classes, in the order of the model's outputs.
        batch_size: texts per forward pass.
        max_length: maximum tokens per text; longer texts are truncated.
        attack: perturbs the embeddings of each text.
        alternatives: (classes, classes), whether two classes exclude each other. None: all are.

    Returns:
        The columns of `Scorer.score`. `bytes` is 0, because no text is predicted.
    """
    truth = label_indices(records, labels)
    attacking = None if attack is None else Attacking(attack, _attacked(alternatives))
    log_chances = head_answers(
        components,
        records,
        torch.from_numpy(truth),
        lambda logits: logits.double().log_softmax(dim=-1),
        outputs=len(labels),
        batch_size=batch_size,
        max_length=max_length,
        attacking=attacking,
    )
    if alternatives is not None:
        log_chances = among(log_chances, truth, alternatives)
    return class_scores(records, truth, log_chances)


def class_scores(
    records: pa.Table,
    truth: npt.NDArray[np.int64],
    log_chances: npt.NDArray[np.float64],
    decided: npt.NDArray[np.int64] | None = None,
) -> pa.Table:
    """Return the scores of predictions.

    Args:
        truth: (records,), each one's class.
        log_chances: (records, classes), the log-probabilities.
        decided: (records,), the predicted classes; None for the likeliest ones.
    """
    return score_table(
        records,
        {
            "loss": -log_chances[np.arange(len(truth)), truth],
            "label": truth,
            "prediction": log_chances.argmax(axis=1) if decided is None else decided,
            "probabilities": list(np.exp(log_chances).astype(np.float32)),
        },
    )


def score_class_frequencies(
    data: DataRecord, records: pa.Table, alternatives: npt.NDArray[np.bool_] | None = None
) -> pa.Table | None:
    """Score each record, but predict each class by its frequency alone, so always the same one.

    The frequencies are those of the training side, with add-one smoothing.

    Args:
        alternatives: as for `score_classification`.

    Returns:
        None without records.
    """
    truth = label_indices(records, data.labels)
    if not len(truth):
        return None
    log_chances = np.tile(np.log(class_counts(data) + 1.0), (len(truth), 1))
    return class_scores(records, truth, among(log_chances, truth, alternatives))


def among(
    log_chances: npt.NDArray[np.float64],
    truth: npt.NDArray[np.int64],
    alternatives: npt.NDArray[np.bool_] | None,
) -> npt.NDArray[np.float64]:
    """Normalize log-probabilities over the classes that are alternatives to each record's own."""
    if alternatives is not None:
        log_chances = np.where(alternatives[truth], log_chances, -np.inf)
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
    result: list[Any] = records.column("label").to_pylist()
    unknown = sorted({str(label) for label in result if label not in known})
    if unknown:
        raise DataError(
            f"test side: label {unknown[0]!r} is not one of {', '.join(labels)}",
            remedy="set data.labels to all labels that may occur, and prepare the data again",
        )
    return np.array([known[label] for label in result], dtype=np.int64)


def _attacked(
    alternatives: npt.NDArray[np.bool_] | None,
) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Return the summed loss among the classes that are alternatives to each text's own.

    Args:
        alternatives: as for `score_classification`.
    """

    def loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = logits.float()
        if alternatives is not None:
            own = torch.from_numpy(alternatives).to(targets.device)[targets]
            logits = logits.masked_fill(~own, -torch.inf)
        return functional.cross_entropy(logits, targets, reduction="sum")

    return loss


class MultiTaskScorer(ClassificationScorer):
    """Scores a classifier with a head for each part."""

    def _score(
        self, components: Components, records: pa.Table, attack: Attack | None = None
    ) -> pa.Table:
        return self._with_parts(super()._score(components, records, attack))

    def score_baseline(self, records: pa.Table) -> pa.Table | None:
        """Predict each class by its frequency among those of its part."""
        scores = score_class_frequencies(self.data, records, self._alternatives())
        return None if scores is None else self._with_parts(scores)

    def _with_parts(self, scores: pa.Table) -> pa.Table:
        owners = np.asarray(part_indices(self.data.labels)[1])
        return scores.append_column("part", pa.array(owners[scores.column("label").to_numpy()]))

    def _alternatives(self) -> npt.NDArray[np.bool_]:
        owners = np.asarray(part_indices(self.data.labels)[1])
        alternatives: npt.NDArray[np.bool_] = owners[:, None] == owners
        return alternatives
