"""Packed documents, for a language model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from steadytrain.components.train.with_transformers.common import (
    ARGUMENTS,
    Kind,
    cross_entropy,
    documents_of,
    train,
)


class Documents(Kind):
    """Each document of a packed row is a row of its own, padded on the right."""

    auto = AutoModelForCausalLM
    grouped = False
    own_loss = ARGUMENTS.get("label_smoothing_factor", 0) > 0

    def collate(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        return self.padded([document for row in rows for document in documents_of(row)])

    def loss(self, outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> Any:
        if getattr(outputs, "aux_loss", None) is not None:
            raise SystemExit("label smoothing of a mixture of experts: the script has no such loss")
        return cross_entropy(outputs.logits[:, :-1].float(), labels[:, 1:], num_items_in_batch)


if __name__ == "__main__":
    train(Documents)
