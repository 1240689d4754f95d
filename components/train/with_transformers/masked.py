"""Texts with hidden tokens, for a masked language model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from transformers import AutoModelForMaskedLM

from steadytrain.components.techniques.masked_tokens.masking import Masking
from steadytrain.components.train.with_transformers.common import RUN, Kind, train


class Masked(Kind):
    """Rows are padded on the right. Their labels are the hidden tokens."""

    auto = AutoModelForMaskedLM

    @cached_property
    def masking(self) -> Masking:
        return Masking.by(self.tokenizer, RUN["objective"]["probability"])

    def draw(self, row: dict[str, Any], *seed: int) -> dict[str, Any]:
        ids, targets = self.masking.apply(row["input_ids"], *seed)
        return {"input_ids": ids, "targets": targets}

    def collate(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        return self.padded([(row["input_ids"], row["targets"]) for row in rows])


if __name__ == "__main__":
    train(Masked)
