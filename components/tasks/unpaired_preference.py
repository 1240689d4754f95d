"""Feedback without pairs: good answers become more likely, and bad ones less.

From Ethayarajh et al. 2024, "KTO: Model Alignment as Prospect Theoretic Optimization": the reward
of an answer counts from a reference point, which is how far the model has moved away from the
reference model. As in TRL, that is estimated with the answers of the global batch, each after
another one's prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch

from steadytrain.components.tasks.base import MEASURED, Batch, LossSum, Row
from steadytrain.components.tasks.preference import PreferenceTraining, document_likelihoods
from steadytrain.components.techniques.mixup.mixing import PARTNER
from steadytrain.components.techniques.modules import eval_mode
from steadytrain.components.techniques.preferences.loss import kto_loss, kto_margins

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
            found = document_likelihoods(model, others)
        return (found - self._reference_likelihoods(model, others)).sum()

    def compute_loss(self, model: torch.nn.Module, batch: Batch) -> LossSum:
        own, kto = _own(batch), self.config.training.kto
        reference = self._reference_likelihoods(model, own)
        # The divergence itself is never negative, only its estimate.
        point = batch[MEASURED].clamp(min=0)

        def comparison(found: torch.Tensor) -> torch.Tensor:
            margins = kto_margins(found - reference - point, batch["desirable"], kto)
            return kto_loss(margins, batch["desirable"], kto).sum()

        return LossSum(document_likelihoods(model, own, comparison))

    @torch.no_grad()
    def validate(self, model: torch.nn.Module, batch: Batch) -> dict[str, float]:
        """Return sums with 0 as the reference point, so that each record counts alone."""
        own, kto = _own(batch), self.config.training.kto
        gained = document_likelihoods(model, own) - self._reference_likelihoods(model, own)
        margins = kto_margins(gained, batch["desirable"], kto)
        return {
            "loss": kto_loss(margins, batch["desirable"], kto).sum().item(),
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
    found = {name: values[:limit] for name, values in joined.items()}
    return {**found, "lengths": [len(found["input_ids"])]}


def _own(batch: Batch) -> Batch:
    """Return what the model gets for the rows themselves."""
    return {
        name: value
        for name, value in batch.items()
        if name not in ("desirable", MEASURED) and not name.startswith(_MISMATCHED)
    }
