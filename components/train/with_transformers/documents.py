"""Documents for a language model: packed, with hidden spans, or with hidden tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM

from steadytrain.components.tasks.encoding.plain_text import sentinels_in
from steadytrain.components.techniques.hidden_spans.spans import SpanCorruption
from steadytrain.components.techniques.masked_tokens.masking import Masking
from steadytrain.components.train.with_transformers.common import (
    ARGUMENTS,
    RUN,
    Kind,
    cross_entropy,
    documents_of,
)


class Documents(Kind):
    """Each document of a packed row is a row of its own, padded on the right."""

    auto = AutoModelForCausalLM
    grouped = False
    own_loss = ARGUMENTS.get("label_smoothing_factor", 0) > 0

    def collate(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        return self.padded([document for row in rows for document in documents_of(row)])

    def loss(self, outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> Any:
        if getattr(outputs, "aux_loss", None) is not None:
            raise SystemExit("label smoothing of a mixture of experts: the script has no such loss")
        return cross_entropy(outputs.logits[:, :-1].float(), labels[:, 1:], num_items_in_batch)


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


class Masked(Kind):
    """Rows are padded on the right. Their labels are the hidden tokens."""

    auto = AutoModelForMaskedLM

    @cached_property
    def masking(self) -> Masking:
        return Masking.by(self.tokenizer, RUN["objective"]["probability"])

    def draw(self, row: dict[str, Any], *seed: int) -> dict[str, Any]:
        ids, targets = self.masking.apply(row["input_ids"], *seed)
        return {"input_ids": ids, "targets": targets}

    def collate(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        return self.padded([(row["input_ids"], row["targets"]) for row in rows])
