"""Preferences: pairs of answers, of which the first is better (DPO), or single ones (KTO)."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM

from steadytrain.components.tasks.preference import mismatched, without_adapters
from steadytrain.components.techniques.base import IGNORED
from steadytrain.components.techniques.mixup.mixing import PARTNER
from steadytrain.components.techniques.modules import eval_mode
from steadytrain.components.techniques.preferences.loss import (
    dpo_loss,
    kto_loss,
    kto_margins,
    reward_margins,
)
from steadytrain.components.train.with_transformers.common import (
    ARGUMENTS,
    RUN,
    Kind,
    MeanTrainer,
    documents_of,
    smoothing,
)

OTHERS = "mismatched_"


def likelihoods(model: Any, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the log-likelihood of each document's targets, (documents,) in float64."""
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    logits = model(**inputs, use_cache=False).logits[:, :-1].float().transpose(1, 2)
    labels = batch["targets"][:, 1:]
    nats = functional.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="none")
    return -nats.double().sum(1)


class ReferenceTrainer(MeanTrainer):
    """Trainer whose loss compares the model with the model before training.

    With adapters, that is the model without them.
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
        # Trainer would count them if they were labels.
        return {"targets": batch.pop("labels"), **batch}


class AnswerTrainer(ReferenceTrainer):
    """Trainer whose rewards start at the model's divergence from the reference model.

    Before each step, the answers of the global batch estimate it, each after another answer's
    prompt. In validation, rewards start at 0.

    point: the estimate, a scalar.
    """

    point: torch.Tensor

    def get_batch_samples(self, *args: Any, **given: Any) -> Any:
        batches, items = super().get_batch_samples(*args, **given)
        total = torch.zeros((), dtype=torch.float64, device=self.args.device)
        model = self.model_wrapped
        for batch in batches:
            others = {
                name.removeprefix(OTHERS): value.to(self.args.device)
                for name, value in batch.items()
                if name.startswith(OTHERS)
            }
            with self.compute_loss_context_manager(), eval_mode(model):
                moved = likelihoods(model, others) - self.reference_likelihoods(model, others)
            total += moved.sum()
        # The divergence itself is never negative, only its estimate.
        self.point = self.accelerator.reduce(total).clamp(min=0) / RUN["global_batch_size"]
        return batches, items

    def row_losses(self, model: Any, batch: dict[str, Any]) -> torch.Tensor:
        reference = self.reference_likelihoods(model, batch)
        gained = likelihoods(model, batch) - reference
        if torch.is_grad_enabled():
            gained = gained - self.point
        kto, good = RUN["objective"], batch["desirable"]
        margins = kto_margins(gained, good, kto["beta"])
        return kto_loss(margins, good, (kto["desirable_weight"], kto["undesirable_weight"]))


class Answers(Pairs):
    """A row is an answer. In training, its prompt comes with another row's answer, too."""

    trainer = AnswerTrainer
    partnered = True

    def collate(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        batch = super().collate(rows)
        if PARTNER in rows[0]:
            limit = self.record["sequence_length"]
            others = super().collate([mismatched(row, row[PARTNER], limit) for row in rows])
            batch |= {f"{OTHERS}{name}": value for name, value in others.items()}
        return batch | {"desirable": torch.tensor([bool(row["desirable"]) for row in rows])}
