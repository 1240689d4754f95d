"""Sequences of different lengths as tensors, for models that score records."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from steadytrain.components.tasks.encoding.labeled_text import TYPES


def longest(model: torch.nn.Module, wanted: int) -> int:
    """Return the tokens per forward pass: `wanted`, or fewer if the model has fewer positions."""
    positions = getattr(model.config, "max_position_embeddings", None)
    return min(wanted, positions) if isinstance(positions, int) and positions > 0 else wanted


def pad(rows: Sequence[Sequence[int]], fill: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return token rows as `input_ids` and `attention_mask`, padded on the right."""
    width = max(map(len, rows))
    ids = torch.full((len(rows), width), fill)
    mask = torch.zeros((len(rows), width), dtype=torch.int64)
    for index, row in enumerate(rows):
        ids[index, : len(row)] = torch.tensor(row)
        mask[index, : len(row)] = 1
    return ids, mask


def token_types(rows: Sequence[Sequence[int]]) -> dict[str, torch.Tensor]:
    """Return which text of its pair each token is of, padded on the right, by the model's argument.

    Nothing if the tokenizer does not tell the texts apart: then a model need not know of them.
    """
    types, _ = pad(rows, 0)
    return {TYPES: types} if types.any() else {}


def padding_id(tokenizer: Any) -> int:
    """Return the padding token. If there is none, any token works, because padding is masked."""
    padding: int | None = tokenizer.pad_token_id
    return (tokenizer.eos_token_id or 0) if padding is None else padding
