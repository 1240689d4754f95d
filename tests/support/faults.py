"""Tasks that break, or ask for something, in the middle of a real training.

Addressed as `support.faults:Class`; each acts in the forward pass of the step
that FAULT_STEP names (counting from 1, one micro-batch a step).
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path

import torch

from steadytrain.components.tasks.base import Batch, LossSum, Row
from steadytrain.components.tasks.causal_lm import CausalLanguageModel


class Faulty(CausalLanguageModel):
    """Does `fault` once, at its step."""

    seen = 0

    def loss(self, model: torch.nn.Module, batch: Batch) -> LossSum:
        self.seen += 1
        found = super().loss(model, batch)
        return self.fault(found) if self.seen == int(os.environ["FAULT_STEP"]) else found

    def fault(self, found: LossSum) -> LossSum:
        return found


class NotANumber(Faulty):
    """The loss of one micro-batch is not a number."""

    def fault(self, found: LossSum) -> LossSum:
        return LossSum(found.total * math.nan)


class InfiniteGradient(Faulty):
    """The loss is finite, its gradient is not."""

    def fault(self, found: LossSum) -> LossSum:
        found.total.register_hook(lambda gradient: gradient * math.inf)
        return found


class Bug(Faulty):
    """The user's own code raises."""

    def fault(self, found: LossSum) -> LossSum:
        raise KeyError("no such thing; the token is hf_abcdefghijklmnopqrstuvwxyz0123456789")


class Stops(Faulty):
    """Someone writes the attempt's stop file, whose path and content the environment tells."""

    def fault(self, found: LossSum) -> LossSum:
        Path(os.environ["STOP_FILE"]).write_text(os.environ["STOP_CONTENT"])
        return found


class MissingField(CausalLanguageModel):
    """The user's own code asks for a field that no row has."""

    def collate(self, rows: Sequence[Row]) -> Batch:
        return {"input_ids": torch.stack([torch.as_tensor(row["no_such_field"]) for row in rows])}


class PoisonedToken(CausalLanguageModel):
    """The loss of a batch with the poisoned token is not a number."""

    TOKEN = 63

    def loss(self, model: torch.nn.Module, batch: Batch) -> LossSum:
        found = super().loss(model, batch)
        return (
            LossSum(found.total * math.nan) if (batch["input_ids"] == self.TOKEN).any() else found
        )


class SilentWeight(Faulty):
    """A weight becomes infinite that the loss does not depend on."""

    def fault(self, found: LossSum) -> LossSum:
        with torch.no_grad():
            self.model.get_input_embeddings().weight[0] = math.inf
        return found

    def build_model(self) -> torch.nn.Module:
        self.model = super().build_model()
        return self.model
