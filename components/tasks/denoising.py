"""Denoising: a causal language model learns to write the hidden spans of a text."""

from __future__ import annotations

from functools import cached_property

from steadytrain.components.tasks.base import Row
from steadytrain.components.tasks.causal_lm import CausalLanguageModel
from steadytrain.components.tasks.span_corruption import SpanCorruption


class Denoising(CausalLanguageModel):
    """Predict the hidden spans of each row. What is drawn from a row is one document."""

    task = "denoising"
    padded = "input_ids"

    @cached_property
    def corruption(self) -> SpanCorruption:
        return SpanCorruption.by(self.tokenizer, self.config.training.denoising)

    def draw(self, row: Row, place: int, *, training: bool) -> Row:
        # Validation hides the same spans for every seed of training.
        seed = (1, self.config.training.seed, place) if training else (0, place)
        found = self.corruption.apply(row["input_ids"], self.data.sequence_length, *seed)
        return {
            "input_ids": found.input_ids,
            "targets": found.targets,
            "lengths": [len(found.input_ids)],
        }
