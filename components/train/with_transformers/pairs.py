"""Pairs of answers, of which the first is preferred (DPO)."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM

from steadytrain.components.tasks.preference import without_adapters
from steadytrain.components.techniques.base import IGNORED
from steadytrain.components.techniques.modules import eval_mode
from steadytrain.components.techniques.preferences.loss import dpo_loss, reward_margins
from steadytrain.components.train.with_transformers.common import (
    ARGUMENTS,
    RUN,
    Kind,
    MeanTrainer,
    documents_of,
    smoothing,
    train,
)


def likelihoods(model: Any, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the log-likelihood of what is counted of each document, (documents,) in float64."""
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    logits = model(**inputs, use_cache=False).logits[:, :-1].float().transpose(1, 2)
    labels = batch["targets"][:, 1:]
    nats = functional.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="none")
    return -nats.double().sum(1)


class ReferenceTrainer(MeanTrainer):
    """Trainer with the model before training, which the loss compares the trained one with.

    With adapters, that is the trained one without them.
    """

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.reference: Any = None
        if RUN["adapter"] is None:
            half = torch.bfloat16 if ARGUMENTS["bf16"] else torch.float16
            kept = half if ARGUMENTS["bf16"] or ARGUMENTS["fp16"] else torch.float32
            frozen = copy.deepcopy(self.model).requires_grad_(False)
            self.reference = frozen.to(self.args.device, kept)

    def row_losses(self, model: Any, batch: dict[str, Any]) -> torch.Tensor:
        reference = self.reference_likelihoods(model, batch)
        margins = reward_margins(likelihoods(model, batch), reference, RUN["objective"]["beta"])
        return dpo_loss(margins, smoothing())

    def reference_likelihoods(self, model: Any, batch: dict[str, Any]) -> torch.Tensor:
        """Return the log-likelihoods by the model before training."""
        if self.reference is None:
            with without_adapters(model), eval_mode(model):
                return likelihoods(model, batch)
        with eval_mode(self.reference):
            return likelihoods(self.reference, batch)


class Pairs(Kind):
    """The two documents of a row are two rows, padded on the right."""

    auto = AutoModelForCausalLM
    trainer = ReferenceTrainer
    own_loss = False

    def collate(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        batch = self.padded([document for row in rows for document in documents_of(row)])
        # As labels, Trainer would count them.
        return {"targets": batch.pop("labels"), **batch}


if __name__ == "__main__":
    train(Pairs)
