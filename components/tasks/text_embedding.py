"""Embed texts: those that belong together get similar vectors, all others different ones.

A row is a pair of texts (Henderson et al. 2017), or one text that passes the model twice with
different dropout (unsupervised SimCSE, Gao et al. 2021).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
import pyarrow.compute as pc
import torch

from steadytrain.components.shared.errors import BadInput
from steadytrain.components.tasks.base import Batch, LossSum, Row
from steadytrain.components.tasks.encoding.text_pairs import halves
from steadytrain.components.tasks.models import build
from steadytrain.components.tasks.packaging import TransformersPackager
from steadytrain.components.tasks.scoring.padding import pad
from steadytrain.components.tasks.scoring.table import read_batches
from steadytrain.components.tasks.text import TextTraining, drops
from steadytrain.components.techniques.contrastive_texts.loss import (
    Compared,
    compare,
    embedded,
    excluded_negatives,
    numbered,
    without_pooler,
)


class TextEmbedding(TextTraining):
    """Find the counterpart of each text among those of the micro-batch.

    Rows are not grouped by length (`padded`), so that the negatives are a random sample.
    """

    task = "text_embedding"
    auto = "AutoModel"

    def build_model(self) -> torch.nn.Module:
        from transformers import AutoModel

        return without_pooler(build(AutoModel, self.config, self.data, self.tokenizer))

    def ready(self, model: torch.nn.Module) -> Sequence[str]:
        if not drops(model) and self._has_single_texts():
            raise BadInput(
                f"data.columns.text = {self.config.data.columns.text!r}: a text without a "
                "counterpart learns from two passes that differ by dropout, and the model has none",
                remedy="set model.dropout, or give pairs: data.columns.prompt and completion",
            )
        return super().ready(model)

    def _has_single_texts(self) -> bool:
        batches = read_batches(self.data, "train", ["lengths"])
        return any(
            pc.min(pc.list_value_length(batch.column("lengths"))).as_py() == 1 for batch in batches
        )

    @cached_property
    def special(self) -> tuple[int, ...]:
        """The special tokens, sorted."""
        return tuple(sorted(self.tokenizer.all_special_ids))

    def draw(self, row: Row, position: int, *, training: bool) -> Row:
        """Return a pair. A single text is paired with itself, and in validation with its half.

        Two passes of one text differ only by dropout, which validation does not have.
        """
        del position
        if len(row["lengths"]) == 2:
            return row
        ids = np.asarray(row["input_ids"])
        pair = (ids, ids) if training else halves(ids, self.special)
        return {"input_ids": np.concatenate(pair), "lengths": [len(text) for text in pair]}

    def collate(self, rows: Sequence[Row]) -> Batch:
        """Return the first text of each row, and then their counterparts."""
        pairs = [np.split(np.asarray(row["input_ids"]), [int(row["lengths"][0])]) for row in rows]
        texts = [text.tolist() for side in zip(*pairs, strict=True) for text in side]
        ids, mask = pad(texts, self.pad_token_id)
        numbers = numbered([tuple(text) for text in texts])
        return {"input_ids": ids, "attention_mask": mask, "texts": numbers}

    def weight(self, batch: Batch) -> int:
        return len(batch["texts"]) // 2

    def compute_loss(self, model: torch.nn.Module, batch: Batch) -> LossSum:
        training = self.config.training
        losses = in_batch(model, batch).losses(
            training.batch_contrastive.temperature, training.label_smoothing_factor
        )
        return LossSum(losses.sum())

    def validate(self, model: torch.nn.Module, batch: Batch) -> dict[str, float]:
        losses = in_batch(model, batch)
        ranks = losses.ranks()
        return {
            "loss": losses.losses(self.config.training.batch_contrastive.temperature).sum().item(),
            "weight": len(ranks),
            "first": (ranks == 1).sum().item(),
            "reciprocal": (1 / ranks).sum().item(),
        }

    def validation_metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        texts = max(sums["weight"], 1)
        return {
            "loss": sums["loss"] / texts,
            "recall_at_1": sums["first"] / texts,
            "mean_reciprocal_rank": sums["reciprocal"] / texts,
        }


class TextEmbeddingPackager(TransformersPackager):
    """Packages a model that embeds texts."""

    training = TextEmbedding
    pipeline = "feature-extraction"

    def _load_model(self, folder: Path) -> torch.nn.Module:
        return without_pooler(super()._load_model(folder))


def in_batch(model: torch.nn.Module, batch: Batch) -> Compared:
    """Compare the first text of each row with the counterparts of all rows."""
    texts, counterparts = embedded(model, batch).chunk(2)
    first, second = batch["texts"].chunk(2)
    same = excluded_negatives(first, second, first, second)
    return compare(texts, counterparts, counterparts, same)
