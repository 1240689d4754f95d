"""Texts with any number of labels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional

from steadytrain.components.train.with_transformers.common import train
from steadytrain.components.train.with_transformers.texts import Texts


class LabelSets(Texts):
    """A target is 0 or 1 for each label."""

    problem = "multi_label_classification"

    def targets(self, labels: Sequence[Any]) -> torch.Tensor:
        places = range(len(self.labels()))
        return torch.tensor([[float(place in of_row) for place in places] for of_row in labels])

    def loss(self, outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> Any:
        # The labels of a text share its loss, and each counts as an item.
        items = labels.numel() if num_items_in_batch is None else num_items_in_batch
        logits, binary = outputs.logits.float(), functional.binary_cross_entropy_with_logits
        return binary(logits, labels, reduction="sum") / items


if __name__ == "__main__":
    train(LabelSets)
