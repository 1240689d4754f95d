"""Score a language model on pairs of answers, of which one is preferred."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch

from steadytrain.components.tasks.base import Components, Part
from steadytrain.components.tasks.encoding.preference import (
    ANSWERS,
    COMPLETION,
    encode_answers,
    is_desirable,
)
from steadytrain.components.tasks.encoding.tokens import load_tokenizer, truncated
from steadytrain.components.tasks.models import load_frozen
from steadytrain.components.tasks.scoring.language import document_losses
from steadytrain.components.tasks.scoring.padding import longest, padding_id
from steadytrain.components.tasks.scoring.table import score_table

Floats = npt.NDArray[np.float64]


class PreferenceScorer(Part):
    """Scores a model against the run's base model, in 32 bits. A champion has the same reference.

    The column `margin` is the difference of the rewards: above 0, the preferred answer won.
    """

    column = "pair"
    answers: Sequence[str] = ANSWERS

    @cached_property
    def reference(self) -> Components:
        """The model that rewards are relative to, with its tokenizer."""
        from transformers import AutoModelForCausalLM

        tokenizer = load_tokenizer(self.data.path(self.data.tokenizer))
        base = self.config.model.base
        model = load_frozen(
            AutoModelForCausalLM,
            base,
            "model.base",
            self.config,
            self.data,
            tokenizer,
            dtype=torch.float32,
        )
        return {"model": model, "tokenizer": tokenizer}

    def score(self, components: Components, records: pa.Table) -> pa.Table:
        device = next(components["model"].parameters()).device
        self.reference["model"].to(device)
        contents: list[Any] = records.column(self.column).to_pylist()
        gained = self._losses(self.reference, contents) - self._losses(components, contents)
        margin = self.margins(gained, contents)
        return score_table(records, {"loss": self.losses(margin, contents), "margin": margin})

    def margins(self, gained: Floats, _: Sequence[str]) -> Floats:
        """Return the margin of each record.

        Args:
            gained: how much more likely each document has become, in nats.
        """
        return self.config.training.dpo.beta * (gained[0::2] - gained[1::2])

    def losses(self, margins: Floats, _: Sequence[str]) -> Floats:
        """Return the loss of each record."""
        result: Floats = np.logaddexp(0, -margins)
        return result

    def _losses(self, components: Components, contents: Sequence[str]) -> Floats:
        """Return the loss of each document in nats."""
        model, tokenizer = components["model"], components["tokenizer"]
        length = longest(model, self.data.sequence_length)
        documents = [
            truncated(document, length)
            for content in contents
            for document in encode_answers(tokenizer, content, self.answers)
        ]
        losses = document_losses(
            model.eval(),
            documents,
            batch_size=self.config.evaluation.batch_size,
            length=length,
            fill=padding_id(tokenizer),
        )
        return np.array(losses)

    def score_baseline(self, records: pa.Table) -> pa.Table | None:
        """Score the reference model itself: all margins are 0, which prefers neither answer."""
        if not records.num_rows:
            return None
        contents: list[Any] = records.column(self.column).to_pylist()
        return score_table(records, {"loss": self.losses(np.zeros(len(contents)), contents)})


class UnpairedPreferenceScorer(PreferenceScorer):
    """Scores a model on answers that are good or bad, with 0 as the reference point.

    The column `margin` is the reward of a good answer, and minus the reward of a bad one.
    """

    column = "answer"
    answers = COMPLETION

    def margins(self, gained: Floats, contents: Sequence[str]) -> Floats:
        desirable = [is_desirable(content) for content in contents]
        return self.config.training.kto.beta * np.where(desirable, gained, -gained)

    def losses(self, margins: Floats, contents: Sequence[str]) -> Floats:
        kto = self.config.training.kto
        desirable = [is_desirable(content) for content in contents]
        weights = np.where(desirable, kto.desirable_weight, kto.undesirable_weight)
        # The sigmoid of minus the margin, which does not overflow.
        return weights * np.exp(-np.logaddexp(0, margins))
