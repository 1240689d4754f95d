"""Single answers, which are good or bad (KTO)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from steadytrain.components.tasks.preference import mismatched
from steadytrain.components.techniques.mixup.mixing import PARTNER
from steadytrain.components.techniques.modules import eval_mode
from steadytrain.components.techniques.preferences.loss import kto_loss, kto_margins
from steadytrain.components.train.with_transformers.common import RUN, train
from steadytrain.components.train.with_transformers.pairs import (
    Pairs,
    ReferenceTrainer,
    likelihoods,
)

OTHERS = "mismatched_"


class AnswerTrainer(ReferenceTrainer):
    """Trainer whose rewards count from how far the model has moved away from the reference model.

    The answers of a global batch measure that before each step, each after another one's prompt. In
    validation, rewards count from 0.

    point: it, a scalar.
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
    """A row is an answer. In training, it comes with another one after the same prompt."""

    trainer = AnswerTrainer
    partnered = True

    def collate(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        batch = super().collate(rows)
        if PARTNER in rows[0]:
            limit = self.record["sequence_length"]
            others = super().collate([mismatched(row, row[PARTNER], limit) for row in rows])
            batch |= {f"{OTHERS}{name}": value for name, value in others.items()}
        return batch | {"desirable": torch.tensor([bool(row["desirable"]) for row in rows])}


if __name__ == "__main__":
    train(Answers)
