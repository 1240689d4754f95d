"""Score a masked language model on the test side."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
from torch.nn import functional

from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.records import DataRecord
from steadytrain.components.tasks.base import Components
from steadytrain.components.tasks.encoding.plain_text import text_windows
from steadytrain.components.tasks.encoding.tokens import load_tokenizer
from steadytrain.components.tasks.fitting import batched
from steadytrain.components.tasks.scoring.padding import longest, pad, padding_id
from steadytrain.components.tasks.scoring.table import read_batches, score_pieces
from steadytrain.components.techniques.base import IGNORED
from steadytrain.components.techniques.masked_tokens.masking import Masking

Masked = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]
"""What the model gets of a window, and what it predicts."""


class MaskedScorer:
    """Scores the masked tokens of each record. Its identity decides which ones are masked."""

    def __init__(self, config: RunConfig, data: DataRecord) -> None:
        self.config, self.data = config, data

    def score(self, components: Components, records: pa.Table) -> pa.Table:
        model, tokenizer = components["model"].eval(), components["tokenizer"]
        length = longest(model, self.data.sequence_length)
        windows = list(self._windows(tokenizer, records, length))
        windows.sort(key=lambda item: len(item[1][0]), reverse=True)
        sums = batched(
            lambda part: _losses(model, part, padding_id(tokenizer)).tolist(),
            [item for _, item in windows],
            self.config.evaluation.batch_size,
            lambda item: len(item[0]),
        )
        return _table(records, windows, sums)

    def score_baseline(self, records: pa.Table) -> pa.Table | None:
        """Predict each token by its frequency on the training side, plus one."""
        tokenizer = load_tokenizer(self.data.path(self.data.tokenizer))
        counts = np.ones(len(tokenizer))
        for batch in read_batches(self.data, "train", ["input_ids"]):
            ids = batch.column("input_ids").flatten().to_numpy()
            counts += np.bincount(ids, minlength=len(counts))
        surprise = -np.log(counts / counts.sum())
        windows = list(self._windows(tokenizer, records, self.data.sequence_length))
        losses = [surprise[targets[targets != IGNORED]].sum() for _, (_, targets) in windows]
        table = _table(records, windows, losses)
        return table if np.asarray(table["targets"]).any() else None

    def _windows(
        self, tokenizer: Any, records: pa.Table, length: int
    ) -> Iterator[tuple[int, Masked]]:
        """Yield each masked window with the index of its record."""
        masking = Masking.by(tokenizer, self.config.training.masking.probability)
        texts: list[Any] = records.column("text").to_pylist()
        names = map(str, records.column("id").to_pylist())
        found = text_windows(tokenizer, texts, length)
        for row, (name, windows) in enumerate(zip(names, found, strict=True)):
            seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8])
            for place, ids in enumerate(windows):
                yield row, masking.apply(ids, seed, place)


def _table(
    records: pa.Table, windows: Sequence[tuple[int, Masked]], losses: Sequence[float]
) -> pa.Table:
    """Return the scores of records.

    Args:
        windows: each with the index of its record.
        losses: each window's, in nats.
    """
    counts = [int((targets != IGNORED).sum()) for _, (_, targets) in windows]
    return score_pieces(records, [row for row, _ in windows], losses, counts)


@torch.inference_mode()
def _losses(
    model: torch.nn.Module, windows: Sequence[Masked], fill: int
) -> npt.NDArray[np.float64]:
    """Return the summed loss of each window in nats."""
    device = next(model.parameters()).device
    ids, mask = pad([given.tolist() for given, _ in windows], fill)
    wanted, _ = pad([targets.tolist() for _, targets in windows], IGNORED)
    wanted = wanted.to(device)
    logits = model(input_ids=ids.to(device), attention_mask=mask.to(device)).logits
    kept = wanted != IGNORED
    losses = functional.cross_entropy(logits[kept].float(), wanted[kept], reduction="none")
    sums = torch.zeros(len(windows), dtype=torch.float64, device=device)
    sums.index_add_(0, kept.nonzero()[:, 0], losses.double())
    found: npt.NDArray[np.float64] = sums.cpu().numpy()
    return found
