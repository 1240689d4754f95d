"""Pairs of texts, or texts that pass the model twice, for a model that embeds them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import AutoModel

from steadytrain.components.tasks.encoding.text_pairs import halves
from steadytrain.components.tasks.text_embedding import in_batch
from steadytrain.components.techniques.contrastive_texts.loss import numbered, without_pooler
from steadytrain.components.train.with_transformers.common import (
    RUN,
    Kind,
    MeanTrainer,
    Rows,
    smoothing,
)


class EmbeddingTrainer(MeanTrainer):
    """Trainer that compares each text with the counterparts of all rows of its micro-batch."""

    def row_losses(self, model: Any, batch: dict[str, Any]) -> torch.Tensor:
        return in_batch(model, batch).losses(RUN["objective"]["temperature"], smoothing())


class Embeddings(Kind):
    """The first text of each row comes before their counterparts. All are padded on the right."""

    auto = AutoModel
    trainer = EmbeddingTrainer
    grouped = False
    own_loss = False

    def begin(self, rows: Rows, model: Any) -> None:
        del rows
        without_pooler(model)

    def draw(self, row: dict[str, Any], *seed: int) -> dict[str, Any]:
        """Return a pair. A single text is paired with itself, and in validation with its half."""
        ids, lengths = row["input_ids"], row["lengths"]
        if len(lengths) == 2:
            return {"texts": (ids[: lengths[0]], ids[lengths[0] :])}
        special = sorted(self.tokenizer.all_special_ids)
        return {"texts": (ids, ids) if seed[0] else halves(ids, special)}

    def collate(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        texts = [
            text for side in zip(*(row["texts"] for row in rows), strict=True) for text in side
        ]
        batch = self.padded([(text, text) for text in texts])
        del batch["labels"]
        return {**batch, "texts": numbered([tuple(text) for text in texts])}
