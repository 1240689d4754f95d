"""Texts with hidden spans, which a language model writes after the rest."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from steadytrain.components.tasks.encoding.plain_text import sentinels_in
from steadytrain.components.techniques.hidden_spans.spans import SpanCorruption
from steadytrain.components.train.with_transformers.common import RUN, train
from steadytrain.components.train.with_transformers.documents import Documents


class Spans(Documents):
    """What is drawn from a row is one document."""

    grouped = True

    @cached_property
    def corruption(self) -> SpanCorruption:
        begin, end = self.tokenizer.bos_token_id, self.tokenizer.eos_token_id
        ends, drawn = (end if begin is None else begin, end), RUN["objective"]
        density, span = drawn["noise_density"], drawn["mean_noise_span_length"]
        return SpanCorruption(density, span, ends, sentinels_in(self.tokenizer))

    def draw(self, row: dict[str, Any], *seed: int) -> dict[str, Any]:
        corrupted = self.corruption.apply(row["input_ids"], self.record["sequence_length"], *seed)
        return {**corrupted._asdict(), "lengths": [len(corrupted.input_ids)]}


if __name__ == "__main__":
    train(Spans)
