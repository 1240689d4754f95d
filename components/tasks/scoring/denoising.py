"""Score a language model on the hidden spans of the test side."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, Final

import numpy as np
import pyarrow as pa

from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.records import DataRecord
from steadytrain.components.tasks.base import Components
from steadytrain.components.tasks.encoding.denoised_text import LEAST, corruption_of, plain_windows
from steadytrain.components.tasks.encoding.tokens import Encoded, load_tokenizer
from steadytrain.components.tasks.scoring.language import document_losses, scored_tokens
from steadytrain.components.tasks.scoring.table import (
    longest,
    padding_id,
    read_batches,
    score_pieces,
)

_SAMPLE: Final = 2000
"""Training rows whose targets the baseline counts."""


class DenoisingScorer:
    """Scores the hidden spans of each record. Its identity decides which ones are hidden."""

    def __init__(self, config: RunConfig, data: DataRecord) -> None:
        self.config, self.data = config, data

    def score(self, components: Components, records: pa.Table) -> pa.Table:
        model, tokenizer = components["model"].eval(), components["tokenizer"]
        length = longest(model, self.data.sequence_length)
        found = list(self._documents(tokenizer, records, length))
        losses = document_losses(
            model,
            [document for _, document in found],
            batch_size=self.config.evaluation.batch_size,
            length=length,
            fill=padding_id(tokenizer),
        )
        return _table(records, found, losses)

    def score_baseline(self, records: pa.Table) -> pa.Table | None:
        """Predict each token by its frequency among the targets of training, plus one."""
        tokenizer = load_tokenizer(self.data.path(self.data.tokenizer))
        length, counts = self.data.sequence_length, np.ones(len(tokenizer))
        corruption = corruption_of(tokenizer, self.config.training.denoising)
        rows = (
            ids.as_py()
            for batch in read_batches(self.data, "train", ["input_ids"])
            for ids in batch.column("input_ids")
        )
        for place, ids in enumerate(islice(rows, _SAMPLE)):
            np.add.at(counts, scored_tokens(Encoded(*corruption.apply(ids, length, 0, place))), 1)
        surprise = -np.log(counts / counts.sum())
        found = list(self._documents(tokenizer, records, length))
        losses = [float(surprise[scored_tokens(document)].sum()) for _, document in found]
        return _table(records, found, losses) if found else None

    def _documents(
        self, tokenizer: Any, records: pa.Table, length: int
    ) -> Iterator[tuple[int, Encoded]]:
        """Yield what is drawn from each window, with the index of its record."""
        corruption = corruption_of(tokenizer, self.config.training.denoising)
        texts: list[Any] = records.column("text").to_pylist()
        names = map(str, records.column("id").to_pylist())
        found = plain_windows(tokenizer, texts, length)
        for row, (name, windows) in enumerate(zip(names, found, strict=True)):
            seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8])
            for place, ids in enumerate(windows):
                if len(ids) >= LEAST:
                    yield row, Encoded(*corruption.apply(ids, length, seed, place))


def _table(
    records: pa.Table, found: Sequence[tuple[int, Encoded]], losses: Sequence[float]
) -> pa.Table:
    """Return the scores of records.

    Args:
        found: documents, each with the index of its record.
        losses: each document's, in nats.
    """
    counts = [sum(document.targets) for _, document in found]
    return score_pieces(records, [row for row, _ in found], losses, counts)
