"""Embeddings of texts: the mean state of a text's tokens in the last layer."""

from __future__ import annotations

from typing import Any

import torch

from steadytrain.components.tasks.base import Batch
from steadytrain.components.tasks.batch_contrastive import pooled


def embedded(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """Return the embedding of each text of a micro-batch, (texts, width), float32."""
    states = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
    return pooled(states.last_hidden_state, batch["attention_mask"])


def without_pooler(model: Any) -> torch.nn.Module:
    """Return the model without the layer after the first token's state, which nothing here uses.

    It would get no gradients, and ranks could not exchange them.
    """
    if getattr(model, "pooler", None) is not None:
        model.pooler = None
    found: torch.nn.Module = model
    return found
