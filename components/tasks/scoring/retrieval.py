"""Score a model that embeds texts: does a text find its counterpart among fixed candidates?"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np
import pyarrow as pa
import torch

from steadytrain.components.shared.arrow_files import open_batches
from steadytrain.components.tasks.base import Components, Part
from steadytrain.components.tasks.encoding.text_pairs import halves
from steadytrain.components.tasks.encoding.tokens import load_tokenizer
from steadytrain.components.tasks.fitting import batched
from steadytrain.components.tasks.models import load_frozen
from steadytrain.components.tasks.scoring.padding import longest, pad, padding_id
from steadytrain.components.tasks.scoring.table import score_table
from steadytrain.components.techniques.contrastive_texts.loss import (
    compare,
    embedded,
    excluded_negatives,
    numbered,
    without_pooler,
)
from steadytrain.components.techniques.modules import to_device

CANDIDATES: Final = 512
"""Most texts that each text is compared with, besides its own counterpart."""

Text = tuple[int, ...]
"""The tokens of a text."""


@dataclass(frozen=True)
class Pairs:
    """Texts and their counterparts, in the same order."""

    texts: list[Text]
    own: list[Text]


class RetrievalScorer(Part):
    """Scores how well texts find their counterparts among those of a sample of the test side.

    The column `reciprocal_rank` is 1 if the counterpart is the most similar one. A single text has
    its second half as the counterpart of its first. The scores of a record depend on no record
    around it.
    """

    def score(self, components: Components, records: pa.Table) -> pa.Table:
        model, tokenizer = components["model"].eval(), components["tokenizer"]
        length = longest(model, self.data.sequence_length)
        asked = _pairs(tokenizer, records, length)
        sample = _pairs(tokenizer, self._sample, length)
        fill = padding_id(tokenizer)
        texts, own, candidates = (
            self._embedded(model, part, fill) for part in (asked.texts, asked.own, sample.own)
        )
        comparison = compare(texts, own, candidates, _same(asked, sample).to(texts.device))
        losses = comparison.losses(self.config.training.batch_contrastive.temperature)
        ranks = comparison.ranks().double().cpu().numpy()
        return _table(records, losses.double().cpu().numpy(), 1 / ranks, ranks == 1)

    def score_baseline(self, records: pa.Table) -> pa.Table | None:
        """Score the model before training; from scratch, give what chance is expected to reach."""
        address = self.config.model.base
        tokenizer = load_tokenizer(self.data.path(self.data.tokenizer))
        if not records.num_rows:
            return None
        if address is not None:
            base = {"model": self._base(address, tokenizer), "tokenizer": tokenizer}
            return self.score(base, records)
        counts = self._candidate_counts(tokenizer, records)
        return _table(records, np.log(counts), [_harmonic(n) / n for n in counts], 1 / counts)

    def _base(self, address: str, tokenizer: Any) -> torch.nn.Module:
        from transformers import AutoModel

        given = (AutoModel, address, "model.base", self.config, self.data, tokenizer)
        model = without_pooler(load_frozen(*given, dtype=torch.float32))
        cuda = self.config.compute.device != "cpu" and torch.cuda.is_available()
        return model.to("cuda" if cuda else "cpu")

    @cached_property
    def _sample(self) -> pa.Table:
        """The records whose counterparts are the candidates, chosen by the hash of their ids."""
        stored = open_batches(self.data.path(self.data.test_records))
        records = pa.Table.from_batches([item.checked() for item in stored])
        hashes = [hashlib.sha256(str(name).encode()).digest() for name in records["id"].to_pylist()]
        order = sorted(range(len(hashes)), key=hashes.__getitem__)
        return records.take(order[:CANDIDATES])

    def _candidate_counts(self, tokenizer: Any, records: pa.Table) -> np.ndarray:
        """Return between how many texts each record's counterpart is, itself included."""
        length = self.data.sequence_length
        asked, sample = (_pairs(tokenizer, part, length) for part in (records, self._sample))
        counts: np.ndarray = 1 + (~_same(asked, sample)).sum(1).numpy()
        return counts

    @torch.inference_mode()
    def _embedded(self, model: torch.nn.Module, texts: Sequence[Text], fill: int) -> torch.Tensor:
        """Return the embedding of each text, (texts, width), float32."""
        device, size = next(model.parameters()).device, self.config.evaluation.batch_size
        order = sorted(range(len(texts)), key=lambda index: len(texts[index]), reverse=True)

        def embed(rows: Sequence[int]) -> list[torch.Tensor]:
            ids, mask = pad([texts[index] for index in rows], fill)
            batch = {"input_ids": ids, "attention_mask": mask}
            return list(embedded(model, to_device(batch, device)))

        vectors = torch.stack(batched(embed, order, size, lambda index: len(texts[index])))
        return vectors[torch.tensor(order, device=device).argsort()]


def _table(records: pa.Table, losses: Any, reciprocal_ranks: Any, first: Any) -> pa.Table:
    """Return the scores of records.

    Args:
        losses: (records,), in nats.
        reciprocal_ranks: (records,).
        first: (records,), how likely the counterpart's rank is 1.
    """
    values = {"loss": losses, "reciprocal_rank": reciprocal_ranks, "first": first}
    return score_table(records, values)


def _pairs(tokenizer: Any, records: pa.Table, length: int) -> Pairs:
    """Return the texts of records in tokens, each with its counterpart."""
    texts: list[Any] = records.column("text").to_pylist()
    others: list[Any] = records.column("completion").to_pylist()

    def tokens(given: list[str]) -> list[list[int]]:
        result: list[list[int]] = tokenizer(given, truncation=True, max_length=length)["input_ids"]
        return result

    special = tuple(sorted(tokenizer.all_special_ids))
    # A text without a counterpart stands in for it here, and is split below.
    filled = [text if other is None else other for text, other in zip(texts, others, strict=True)]
    pairs = Pairs([], [])
    for first, second, other in zip(tokens(texts), tokens(filled), others, strict=True):
        both = halves(first, special) if other is None else (first, second)
        pairs.texts.append(tuple(map(int, both[0])))
        pairs.own.append(tuple(map(int, both[1])))
    return pairs


def _same(asked: Pairs, sample: Pairs) -> torch.Tensor:
    """Return which candidates are no negatives, (asked, candidates), bool."""
    sizes = [len(part) for part in (asked.texts, asked.own, sample.texts, sample.own)]
    numbers = numbered([*asked.texts, *asked.own, *sample.texts, *sample.own])
    return excluded_negatives(*torch.split(numbers, sizes))


def _harmonic(count: int) -> float:
    return float((1 / np.arange(1, count + 1)).sum())
