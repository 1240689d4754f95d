"""Preferences: good answers become more likely, and bad ones less, in pairs or without.

Pairs, from Rafailov et al. 2023, "Direct Preference Optimization": the loss compares how much more
likely each answer has become than it is for the reference model, which is the model before
training.

Single answers, from Ethayarajh et al. 2024, "KTO: Model Alignment as Prospect Theoretic
Optimization": the reward of an answer counts from a reference point, which is how far the model has
moved away from the reference model. As in TRL, that is estimated with the answers of the global
batch, each after another one's prompt.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Final

import numpy as np
import torch

from steadytrain.components.shared.errors import BadInput
from steadytrain.components.tasks.base import MEASURED, Batch, LossSum, Row
from steadytrain.components.tasks.causal_lm import SupervisedFineTuning, token_logits
from steadytrain.components.tasks.documents import attend_by_document
from steadytrain.components.tasks.fused_head import Comparison, likelihoods_of
from steadytrain.components.tasks.models import load_frozen
from steadytrain.components.techniques.mixup.mixing import PARTNER
from steadytrain.components.techniques.modules import eval_mode
from steadytrain.components.techniques.preferences.loss import (
    dpo_loss,
    kto_loss,
    kto_margins,
    reward_margins,
)


class PreferenceTraining(SupervisedFineTuning):
    """Prefer the first of a row's two documents to the second."""

    task = "preference"
    padded = "input_ids"
    reference: torch.nn.Module | None = None

    def ready(self, model: torch.nn.Module) -> Sequence[str]:
        remarks = super().ready(model)
        if not self.config.model.adapter.freezes:
            self.reference = self._get_reference()
        return remarks

    def _get_reference(self) -> torch.nn.Module:
        """Load the base model once more. What the trained one supports, it supports too."""
        from transformers import AutoModelForCausalLM

        from steadytrain.components.tasks.fused_head import fuse_head

        base = self.config.model.base
        if base is None:
            raise BadInput(
                "model.base is not set, and a preference is learned against the model before "
                "training",
                remedy="name a model that has been trained",
            )
        model = load_frozen(
            AutoModelForCausalLM, base, "model.base", self.config, self.data, self.tokenizer
        )
        fuse_head(model)
        if self.by_document:
            attend_by_document(model, len(self.tokenizer))
        return model

    def collate(self, rows: Sequence[Row]) -> Batch:
        batch = super().collate(rows)
        batch["counts"] = [count for row in rows for count in _target_counts(row)]
        return batch

    def weight(self, batch: Batch) -> int:
        return len(batch["counts"]) // 2

    def compute_loss(self, model: torch.nn.Module, batch: Batch) -> LossSum:
        training = self.config.training
        reference = self._reference_likelihoods(model, batch)

        def comparison(found: torch.Tensor) -> torch.Tensor:
            margins = reward_margins(found, reference, training.dpo.beta)
            return dpo_loss(margins, training.label_smoothing_factor).sum()

        return LossSum(document_likelihoods(model, batch, comparison))

    @torch.no_grad()
    def validate(self, model: torch.nn.Module, batch: Batch) -> dict[str, float]:
        likelihoods = document_likelihoods(model, batch)
        reference = self._reference_likelihoods(model, batch)
        margins = reward_margins(likelihoods, reference, self.config.training.dpo.beta)
        return {
            "loss": dpo_loss(margins).sum().item(),
            "weight": len(margins),
            "correct": (margins > 0).sum().item(),
            "margin": margins.sum().item(),
        }

    def validation_metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        pairs = max(sums["weight"], 1)
        return {
            "loss": sums["loss"] / pairs,
            "preference_accuracy": sums["correct"] / pairs,
            "preference_margin": sums["margin"] / pairs,
        }

    def _reference_likelihoods(self, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        """Return the reference model's log-likelihoods: without adapters, the trained one is it."""
        if self.reference is None:
            with without_adapters(model), eval_mode(model):
                return document_likelihoods(model, batch)
        self.reference.to(batch["targets"].device)
        with torch.no_grad():
            return document_likelihoods(self.reference, batch)


def document_likelihoods(
    model: torch.nn.Module, batch: Batch, comparison: Comparison | None = None
) -> torch.Tensor:
    """Return the log-likelihood of each document, (documents,), or the loss of comparing them.

    Only the loss is differentiable, and once.
    """
    forward = partial(token_logits, model, batch)
    return likelihoods_of(forward, batch["targets"], batch["counts"], comparison)


@contextlib.contextmanager
def without_adapters(model: torch.nn.Module) -> Iterator[None]:
    """Within this context, a model's adapters are off.

    PEFT's own switch also changes what needs gradients, which sharded weights do not survive.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def _target_counts(row: Row) -> Iterator[int]:
    """Yield the number of targets of each document in a row. A document's first token is none."""
    start, targets = 0, np.asarray(row["targets"])
    for length in map(int, row["lengths"]):
        yield int(targets[start + 1 : start + length].sum())
        start += length


_MISMATCHED: Final = "mismatched_"
"""Prefix of what belongs to the prompts with answers of other rows."""


class UnpairedPreferenceTraining(PreferenceTraining):
    """Learn from one answer in a row, which is good or bad."""

    task = "unpaired_preference"

    def collate(self, rows: Sequence[Row]) -> Batch:
        batch = super().collate(rows)
        if PARTNER in rows[0]:
            limit = self.data.sequence_length
            others = super().collate([mismatched(row, row[PARTNER], limit) for row in rows])
            batch |= {f"{_MISMATCHED}{name}": value for name, value in others.items()}
        batch["desirable"] = torch.tensor([bool(row["desirable"]) for row in rows])
        return batch

    def weight(self, batch: Batch) -> int:
        return len(batch["counts"])

    @torch.no_grad()
    def measure(self, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        """Return the summed log ratio of the mismatched answers."""
        others = {
            name.removeprefix(_MISMATCHED): value
            for name, value in batch.items()
            if name.startswith(_MISMATCHED)
        }
        with eval_mode(model):
            likelihoods = document_likelihoods(model, others)
        return (likelihoods - self._reference_likelihoods(model, others)).sum()

    def compute_loss(self, model: torch.nn.Module, batch: Batch) -> LossSum:
        answers, kto = _own(batch), self.config.training.kto
        reference = self._reference_likelihoods(model, answers)
        # The divergence itself is never negative, only its estimate.
        point = batch[MEASURED].clamp(min=0)

        def comparison(found: torch.Tensor) -> torch.Tensor:
            margins = kto_margins(found - reference - point, batch["desirable"], kto.beta)
            return kto_loss(margins, batch["desirable"], kto.weights).sum()

        return LossSum(document_likelihoods(model, answers, comparison))

    @torch.no_grad()
    def validate(self, model: torch.nn.Module, batch: Batch) -> dict[str, float]:
        """Return sums with 0 as the reference point, so that each record counts alone."""
        answers, kto = _own(batch), self.config.training.kto
        gained = document_likelihoods(model, answers) - self._reference_likelihoods(model, answers)
        margins = kto_margins(gained, batch["desirable"], kto.beta)
        return {
            "loss": kto_loss(margins, batch["desirable"], kto.weights).sum().item(),
            "weight": len(margins),
            "correct": (margins > 0).sum().item(),
            "margin": margins.sum().item(),
        }


def mismatched(row: Row, other: Row, limit: int) -> Row:
    """Return a row's prompt with the answer of another row, cut to `limit` tokens.

    All before the first target is the prompt.
    """
    ends = [int(np.argmax(np.asarray(each["targets"]) > 0)) for each in (row, other)]
    joined = {
        name: np.concatenate((np.asarray(row[name])[: ends[0]], np.asarray(other[name])[ends[1] :]))
        for name in ("input_ids", "targets")
    }
    columns = {name: values[:limit] for name, values in joined.items()}
    return {**columns, "lengths": [len(columns["input_ids"])]}


def _own(batch: Batch) -> Batch:
    """Return what the model gets for the rows themselves."""
    return {
        name: value
        for name, value in batch.items()
        if name not in ("desirable", MEASURED) and not name.startswith(_MISMATCHED)
    }
