"""What the head of a model answers about the raw texts of records."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch

from steadytrain.components.tasks.base import Batch, Components
from steadytrain.components.tasks.encoding.labeled_text import PAIR, pair_tokens
from steadytrain.components.tasks.fitting import batched
from steadytrain.components.tasks.scoring.padding import longest, pad, padding_id, token_types
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
                batch |= token_types([types[row] for row in rows], ids.shape[1])
            return list(forward(to_device(batch, device)))

        ordered = np.stack(batched(ask, order, batch_size, lambda row: len(encoded[row])))
        found = np.empty_like(ordered)
        found[order] = ordered
        return found

    starts = range(0, len(texts), _RECORDS_AT_ONCE)
    places = [slice(start, start + _RECORDS_AT_ONCE) for start in starts]
    parts = [answers(texts[place], targets[place]) for place in places]
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
    found: npt.NDArray[np.float64] = answer(_logits(model, batch)).cpu().numpy()
    return found


def _logits(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    inputs = {name: value for name, value in batch.items() if name != "targets"}
    logits: torch.Tensor = model(**inputs).logits
    return logits
