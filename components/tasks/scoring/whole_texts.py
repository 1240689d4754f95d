"""What the head of a model answers about the raw texts of records, and scores of predicted numbers.

The baseline of numbers is the middle of the training side.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch

from steadytrain.components.tasks.base import Batch, Components, Part
from steadytrain.components.tasks.encoding.labeled_text import PAIR, pair_tokens
from steadytrain.components.tasks.fitting import batched
from steadytrain.components.tasks.scoring.padding import longest, pad, padding_id, token_types
from steadytrain.components.tasks.scoring.table import score_table, training_numbers
from steadytrain.components.techniques.adversarial_training import Attack
from steadytrain.components.techniques.adversarial_training.attack import perturbed, search
from steadytrain.components.techniques.modules import to_device

_RECORDS_AT_ONCE = 2048

Answer = Callable[[torch.Tensor], torch.Tensor]
"""Turns logits (rows, outputs) into what is asked for, of the same shape, float64."""


@dataclass(frozen=True)
class Attacking:
    """An attack on the summed loss of logits (rows, outputs) and targets (rows, ...)."""

    attack: Attack
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def head_answers(
    components: Components,
    records: pa.Table,
    targets: torch.Tensor,
    answer: Answer,
    *,
    outputs: int,
    batch_size: int,
    max_length: int,
    attacking: Attacking | None = None,
) -> npt.NDArray[np.float64]:
    """Return the answers (records, outputs), in the order of the records.

    Args:
        components: "model" and "tokenizer".
        records: with the column `text`; with pairs of texts also `text_pair`.
        targets: (records, ...), which only an attack reads.
        batch_size: texts per forward pass.
        max_length: maximum tokens per text; longer texts are truncated.
        attacking: perturbs the embeddings of each text.
    """
    model, tokenizer = components["model"], components["tokenizer"]
    model.eval()
    length = longest(model, max_length)
    texts: list[Any] = records.column("text").to_pylist()
    if PAIR in records.column_names:
        texts = [*zip(texts, records.column(PAIR).to_pylist(), strict=True)]

    def forward(batch: Batch) -> npt.NDArray[np.float64]:
        if attacking is None:
            return _answered(model, batch, answer)
        worst = search(
            model,
            batch,
            attacking.attack,
            lambda: attacking.loss(_logits(model, batch), batch["targets"]),
        )
        with perturbed(model, worst.detach()):
            return _answered(model, batch, answer)

    device, fill = next(model.parameters()).device, padding_id(tokenizer)

    def answers(texts: Sequence[Any], own: torch.Tensor) -> npt.NDArray[np.float64]:
        encoded, types = _encoded(tokenizer, texts, length)
        order = sorted(range(len(encoded)), key=lambda row: len(encoded[row]), reverse=True)

        def ask(rows: Sequence[int]) -> list[npt.NDArray[np.float64]]:
            ids, mask = pad([encoded[row] for row in rows], fill)
            batch = {"input_ids": ids, "attention_mask": mask, "targets": own[list(rows)]}
            if types:
                batch |= token_types([types[row] for row in rows])
            return list(forward(to_device(batch, device)))

        ordered = np.stack(batched(ask, order, batch_size, lambda row: len(encoded[row])))
        result = np.empty_like(ordered)
        result[order] = ordered
        return result

    starts = range(0, len(texts), _RECORDS_AT_ONCE)
    places = [slice(start, start + _RECORDS_AT_ONCE) for start in starts]
    parts = [answers(texts[index], targets[index]) for index in places]
    return np.concatenate([np.zeros((0, outputs)), *parts])


def _encoded(
    tokenizer: Any, texts: Sequence[Any], length: int
) -> tuple[list[list[int]], list[list[int]]]:
    """Return the tokens of texts, and of pairs which text each is of."""
    if isinstance(texts[0], tuple):
        ids, types = map(list, zip(*pair_tokens(tokenizer, texts, length), strict=True))
        return ids, types
    return tokenizer(texts, truncation=True, max_length=length)["input_ids"], []


@torch.inference_mode()
def _answered(model: torch.nn.Module, batch: Batch, answer: Answer) -> npt.NDArray[np.float64]:
    result: npt.NDArray[np.float64] = answer(_logits(model, batch)).cpu().numpy()
    return result


def _logits(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    inputs = {name: value for name, value in batch.items() if name != "targets"}
    logits: torch.Tensor = model(**inputs).logits
    return logits


class RegressionScorer(Part):
    """Scores predicted numbers.

    The loss of a model of texts is relative to the training variance.
    """

    @cached_property
    def seen(self) -> npt.NDArray[np.float64]:
        """The numbers of the training side."""
        return training_numbers(self.data)

    @property
    def unit(self) -> float:
        """The squared error that the loss counts as 1, as in training."""
        return float(self.seen.var())

    def score(self, components: Components, records: pa.Table) -> pa.Table:
        return self._score(components, records)

    def score_attacked(self, components: Components, records: pa.Table, attack: Attack) -> pa.Table:
        return self._score(components, records, Attacking(attack, _squared_errors))

    def _score(
        self, components: Components, records: pa.Table, attacking: Attacking | None = None
    ) -> pa.Table:
        truth = _numbers(records)
        answers = head_answers(
            components,
            records,
            torch.from_numpy(truth),
            torch.Tensor.double,
            outputs=1,
            batch_size=self.config.evaluation.batch_size,
            max_length=self.data.sequence_length,
            attacking=attacking,
        )
        return self._table(records, truth, answers[:, 0], answers[:, 0])

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
                "loss": squared / self.unit,
                "target": truth,
                "predicted": predicted,
                "squared_error": squared,
                "absolute_error": np.abs(middle - truth),
            },
        )


def _numbers(records: pa.Table) -> npt.NDArray[np.float64]:
    result: npt.NDArray[np.float64] = records.column("label").to_numpy()
    return result


def _squared_errors(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (logits[:, 0].double() - targets).square().sum()
