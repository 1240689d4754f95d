"""Masked language models: encoders that predict the hidden tokens of a text from all others."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, partial

import torch
from torch.nn import functional

from steadytrain.components.tasks.base import Batch, LossSum, Row
from steadytrain.components.tasks.fused_head import LossRequest, likelihoods_of, requested
from steadytrain.components.tasks.models import build
from steadytrain.components.tasks.packaging import TransformersPackager
from steadytrain.components.tasks.scoring.padding import pad
from steadytrain.components.tasks.text import LanguageModelTraining
from steadytrain.components.techniques.base import IGNORED
from steadytrain.components.techniques.masked_tokens.masking import Masking


class MaskedLanguageModel(LanguageModelTraining):
    """Predict the masked tokens of each row."""

    task = "masked_lm"
    auto = "AutoModelForMaskedLM"
    padded = "input_ids"

    def build_model(self) -> torch.nn.Module:
        from transformers import AutoModelForMaskedLM

        return build(AutoModelForMaskedLM, self.config, self.data, self.tokenizer)

    def ready(self, model: torch.nn.Module) -> Sequence[str]:
        from steadytrain.components.tasks.fused_head import fuse_head

        why = fuse_head(model)
        return [f"the loss computes the logits of all tokens at once: {why}"] if why else []

    @cached_property
    def masking(self) -> Masking:
        return Masking.by(self.tokenizer, self.config.training.masking.probability)

    def draw(self, row: Row, position: int, *, training: bool) -> Row:
        # Validation masks are the same for every seed of training.
        seed = (1, self.config.training.seed, position) if training else (0, position)
        ids, targets = self.masking.apply(row["input_ids"], *seed)
        return {"input_ids": ids, "targets": targets}

    def collate(self, rows: Sequence[Row]) -> Batch:
        ids, mask = pad([row["input_ids"] for row in rows], self.pad_token_id)
        targets, _ = pad([row["targets"] for row in rows], IGNORED)
        return {"input_ids": ids, "attention_mask": mask, "targets": targets}

    def weight(self, batch: Batch) -> int:
        return int((batch["targets"] != IGNORED).sum())

    def compute_loss(self, model: torch.nn.Module, batch: Batch) -> LossSum:
        return LossSum(masked_loss(model, batch, self.config.training.label_smoothing_factor))

    def load_reference(self, address: str, field: str) -> torch.nn.Module:
        from steadytrain.components.tasks.fused_head import fuse_head

        model = super().load_reference(address, field)
        fuse_head(model)
        return model

    def row_losses(
        self, model: torch.nn.Module, batch: Batch, counts: Sequence[int]
    ) -> torch.Tensor:
        return -likelihoods_of(partial(masked_logits, model, batch), batch["targets"], counts)

    def validate(self, model: torch.nn.Module, batch: Batch) -> dict[str, float]:
        return {"loss": masked_loss(model, batch).item(), "weight": self.weight(batch)}


class MaskedLanguageModelPackager(TransformersPackager):
    """Packages a masked language model."""

    training = MaskedLanguageModel
    pipeline = "fill-mask"


def masked_logits(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """Return the logits of a micro-batch, or what the head is requested to return instead."""
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    logits: torch.Tensor = model(**inputs).logits
    return logits


def masked_loss(model: torch.nn.Module, batch: Batch, smoothing: float = 0.0) -> torch.Tensor:
    """Return the summed cross-entropy of a micro-batch's masked tokens, in nats."""
    targets = batch["targets"]
    with requested(LossRequest(targets, smoothing)) as request:
        logits = masked_logits(model, batch)
    if request.loss is not None:
        # The model's wrappers attached their backward work to this output, not to `request.loss`.
        result: torch.Tensor = logits
        return result
    return functional.cross_entropy(
        logits.flatten(0, 1).float(),
        targets.flatten(),
        ignore_index=IGNORED,
        reduction="sum",
        label_smoothing=smoothing,
    )
