"""Score a causal or masked language model on the test side, and token frequencies as a baseline.

Only the text is scored. The end token that encoding appends is steadytrain's own and adds no loss.
Therefore the summed losses of two models with different tokenizers cover identical bytes and are
comparable per byte. Text that a tokenizer loses is added at 8 bits per byte (see below).
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from operator import add
from typing import Any, Final, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
from torch.nn import functional

from steadytrain.components.shared.records import DataRecord
from steadytrain.components.tasks.base import Components, Part
from steadytrain.components.tasks.encoding.plain_text import (
    LEAST,
    corruption_of,
    plain_windows,
    text_windows,
)
from steadytrain.components.tasks.encoding.tokens import (
    Encoded,
    encode_record,
    encode_texts,
    load_tokenizer,
    rows_of,
    scored_bytes,
    scored_text,
    windows,
)
from steadytrain.components.tasks.fitting import batched
from steadytrain.components.tasks.scoring.padding import longest, pad, padding_id
from steadytrain.components.tasks.scoring.table import read_batches, score_pieces, score_table
from steadytrain.components.techniques.base import IGNORED
from steadytrain.components.techniques.masked_tokens.masking import Masking

# What a tokenizer loses of a text, and what that costs a model.
#
# Unknown tokens, and normalizers that drop or change characters, make a text easier to predict by
# discarding information. Without a cost for that, a model that knows one word and "unknown" would
# win every comparison in bits per byte. Therefore each byte that is missing from the tokens costs
# 8 bits, the cost of sending it as is.

NATS_A_BYTE = math.log(256)


def lost_nats(tokenizer: Any, record: Mapping[str, Any], encoded: Encoded) -> float:
    """Return the cost of the text that a record's scored tokens lose. It is 0 for most tokenizers.

    Characters are counted, not aligned. That gives a lower bound in time linear in the text.
    """
    text = scored_text(record)
    pairs = zip(encoded.input_ids, encoded.targets, strict=True)
    known = [token for token, scored in pairs if scored and token != tokenizer.unk_token_id]
    decoded = tokenizer.decode(known, clean_up_tokenization_spaces=False)
    if decoded == text:
        return 0.0
    missing = Counter(text) - Counter(decoded)
    lost = sum(count * len(character.encode()) for character, count in missing.items())
    return lost * NATS_A_BYTE


_RECORDS_AT_ONCE = 512  # encoded and sorted by length together; limits memory


class LanguageScorer(Part):
    """Scores a language model, in windows of the run's sequence length."""

    def score(self, components: Components, records: pa.Table) -> pa.Table:
        return score_language(
            components,
            records,
            batch_size=self.config.evaluation.batch_size,
            max_length=self.data.sequence_length,
        )

    def score_baseline(self, records: pa.Table) -> pa.Table | None:
        return score_frequencies(self.data, records)


def score_language(
    components: Components, records: pa.Table, *, batch_size: int, max_length: int
) -> pa.Table:
    """Score each record: every token of its text once, given the tokens before it.

    If the tokens lose part of a text, its loss includes the cost of that part.

    A text longer than the model's context is split into windows that share one token, and a chat
    into those of `data.long_records: window`, so that an answer keeps text before it. Text that
    a run cuts off is scored too: other tokenizers would cut it elsewhere.

    Args:
        components: "model" and "tokenizer".
        records: `id`, and `text` or `messages`. In a chat, only what the assistant says is scored.
        batch_size: windows per forward pass.
        max_length: tokens per window.

    Returns:
        The columns of `Scorer.score`, without the classification columns.
    """
    model, tokenizer = components["model"], components["tokenizer"]
    model.eval()
    length, fill = longest(model, max_length), padding_id(tokenizer)

    split = chat_windows if "messages" in records.column_names else windows

    def losses(documents: Sequence[Encoded]) -> list[float]:
        return document_losses(
            model, documents, batch_size=batch_size, length=length, fill=fill, split=split
        )

    return _scored(tokenizer, records, losses)


def score_frequencies(data: DataRecord, records: pa.Table) -> pa.Table | None:
    """Score each record as `score_language` does, but predict each token by its frequency alone.

    The frequencies are those of the training side's targets, with add-one smoothing.

    Returns:
        None if there is no token to score.
    """
    tokenizer = load_tokenizer(data.path(data.tokenizer))
    counts = _token_counts(data, len(tokenizer)) + 1.0
    surprise = -np.log(counts / counts.sum())
    table = _scored(
        tokenizer,
        records,
        lambda found: [float(surprise[scored_tokens(item)].sum()) for item in found],
    )
    return table if np.asarray(table["targets"]).any() else None


def _scored(
    tokenizer: Any, records: pa.Table, losses: Callable[[Sequence[Encoded]], list[float]]
) -> pa.Table:
    """Return the scores of records, whose documents have these losses."""
    loss: list[float] = []
    targets: list[int] = []
    for block in _blocks(records):
        encoded = scored_documents(tokenizer, block)
        loss += map(add, losses(encoded), _lost(tokenizer, block, encoded))
        targets += [sum(document.targets) for document in encoded]
    sizes = [scored_bytes(record) for block in _blocks(records) for record in block]
    return score_table(records, {"loss": loss, "targets": targets, "bytes": sizes})


def scored_tokens(document: Encoded) -> list[int]:
    """Return the targets of a document."""
    pairs = zip(document.input_ids, document.targets, strict=True)
    return [token for token, target in pairs if target]


def _blocks(records: pa.Table) -> Iterator[list[dict[str, Any]]]:
    wanted = [name for name in ("text", "messages") if name in records.column_names]
    for batch in records.select(wanted).to_batches(max_chunksize=_RECORDS_AT_ONCE):
        yield batch.to_pylist()


def scored_documents(tokenizer: Any, block: Sequence[Mapping[str, Any]]) -> list[Encoded]:
    """Encode the documents, with targets only on the scored text."""
    if all(record.get("messages") is None for record in block):
        encoded = encode_texts(tokenizer, [record["text"] for record in block])
        return [Encoded(item.input_ids, [*item.targets[:-1], 0]) for item in encoded]
    special = set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)
    return [_without_turn_ends(encode_record(tokenizer, record), special) for record in block]


def _lost(
    tokenizer: Any, block: Sequence[Mapping[str, Any]], encoded: Sequence[Encoded]
) -> Iterator[float]:
    pairs = zip(block, encoded, strict=True)
    return (lost_nats(tokenizer, record, document) for record, document in pairs)


def _without_turn_ends(encoded: Encoded, special: set[int]) -> Encoded:
    """Remove the special token that ends a turn (or a text) from the targets."""
    following = [*encoded.targets[1:], 0]
    targets = [
        0 if target and not after and token in special else target
        for token, target, after in zip(encoded.input_ids, encoded.targets, following, strict=True)
    ]
    return Encoded(encoded.input_ids, targets)


def chat_windows(encoded: Encoded, length: int) -> list[Encoded]:
    """Return the windows of a chat, which may have nothing to predict."""
    return rows_of(encoded, length, "window") if any(encoded.targets) else []


def document_losses(
    model: torch.nn.Module,
    documents: Sequence[Encoded],
    *,
    batch_size: int,
    length: int,
    fill: int,
    split: Callable[[Encoded, int], list[Encoded]] = windows,
) -> list[float]:
    """Return the summed loss of each document in nats, from windows batched by similar length.

    Args:
        batch_size: windows per forward pass.
        length: tokens per window.
        fill: the padding token.
        split: returns the windows of a document.
    """
    pieces = [
        (index, window)
        for index, document in enumerate(documents)
        for window in split(document, length)
        if any(window.targets)
    ]
    pieces.sort(key=lambda piece: len(piece[1].input_ids), reverse=True)
    sums = batched(
        lambda batch: _window_losses(model, batch, fill),
        [window for _, window in pieces],
        batch_size,
        lambda window: len(window.input_ids),
    )
    totals = np.zeros(len(documents))
    np.add.at(totals, [index for index, _ in pieces], sums)
    result: list[float] = totals.tolist()
    return result


@torch.inference_mode()
def _window_losses(model: torch.nn.Module, batch: Sequence[Encoded], fill: int) -> list[float]:
    device = next(model.parameters()).device
    ids, mask = pad([window.input_ids for window in batch], fill)
    scored, _ = pad([window.targets for window in batch], 0)
    ids, mask = ids.to(device), mask.to(device)
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, :-1]
    return _summed(logits, ids[:, 1:], scored.to(device)[:, 1:].bool())


def _summed(logits: torch.Tensor, targets: torch.Tensor, wanted: torch.Tensor) -> list[float]:
    """Return the summed loss of the wanted targets of each window in nats."""
    losses = functional.cross_entropy(logits[wanted].float(), targets[wanted], reduction="none")
    sums = torch.zeros(len(wanted), dtype=torch.float64, device=wanted.device)
    result: list[float] = sums.index_add_(0, wanted.nonzero()[:, 0], losses.double()).tolist()
    return result


def _token_counts(data: DataRecord, size: int) -> npt.NDArray[np.float64]:
    counts = np.zeros(size)
    for batch in read_batches(data, "train", ["input_ids", "targets"]):
        ids = batch.column("input_ids").flatten().to_numpy()
        wanted = batch.column("targets").flatten().to_numpy(zero_copy_only=False).astype(bool)
        counts += np.bincount(ids[wanted], minlength=size)
    return counts


T = TypeVar("T")
Piece = tuple[int, T, Sequence[int] | npt.NDArray[np.int64]]
"""The index of its record, what the model gets, and the tokens to predict."""
_SAMPLE: Final = 2000
"""Training rows whose targets the baseline counts."""


class DenoisingScorer(Part):
    """Scores the hidden spans of each record. Its identity decides which ones are hidden."""

    def score(self, components: Components, records: pa.Table) -> pa.Table:
        model, tokenizer = components["model"].eval(), components["tokenizer"]
        length = longest(model, self.data.sequence_length)
        found = list(self._documents(tokenizer, records, length))
        losses = document_losses(
            model,
            [document for _, document, _ in found],
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
        for index, ids in enumerate(islice(rows, _SAMPLE)):
            np.add.at(counts, scored_tokens(Encoded(*corruption.apply(ids, length, 0, index))), 1)
        return _by_frequency(records, list(self._documents(tokenizer, records, length)), counts)

    def _documents(
        self, tokenizer: Any, records: pa.Table, length: int
    ) -> Iterator[Piece[Encoded]]:
        """Yield what is drawn from each window."""
        corruption = corruption_of(tokenizer, self.config.training.denoising)
        split = partial(plain_windows, tokenizer, length=length)
        for row, ids, seeds in _seeded_windows(records, split):
            if len(ids) >= LEAST:
                document = Encoded(*corruption.apply(ids, length, *seeds))
                yield row, document, scored_tokens(document)


def _seeded_windows(
    records: pa.Table, split: Callable[[Sequence[str]], list[list[list[int]]]]
) -> Iterator[tuple[int, list[int], tuple[int, int]]]:
    """Yield the windows of the texts, each with the index of its record before it, and its seeds.

    Args:
        split: returns the windows of each text.
    """
    texts: list[Any] = records.column("text").to_pylist()
    names = map(str, records.column("id").to_pylist())
    for row, (name, pieces) in enumerate(zip(names, split(texts), strict=True)):
        seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8])
        for index, ids in enumerate(pieces):
            yield row, ids, (seed, index)


def _table(records: pa.Table, pieces: Sequence[Piece[Any]], losses: Sequence[float]) -> pa.Table:
    """Return the scores of records, from the loss of each piece in nats."""
    counts = [len(targets) for *_, targets in pieces]
    return score_pieces(records, [row for row, *_ in pieces], losses, counts)


def _by_frequency(
    records: pa.Table, pieces: Sequence[Piece[Any]], counts: npt.NDArray[np.float64]
) -> pa.Table | None:
    """Return the scores if each token is predicted by its frequency; None if there is none."""
    surprise = -np.log(counts / counts.sum())
    table = _table(records, pieces, [surprise[targets].sum() for *_, targets in pieces])
    return table if np.asarray(table["targets"]).any() else None


Masked = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]
"""What the model gets of a window, and what it predicts."""


class MaskedScorer(Part):
    """Scores the masked tokens of each record. Its identity decides which ones are masked."""

    def score(self, components: Components, records: pa.Table) -> pa.Table:
        model, tokenizer = components["model"].eval(), components["tokenizer"]
        length = longest(model, self.data.sequence_length)
        windows = list(self._windows(tokenizer, records, length))
        windows.sort(key=lambda item: len(item[1][0]), reverse=True)
        sums = batched(
            lambda part: _losses(model, part, padding_id(tokenizer)),
            [item for _, item, _ in windows],
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
        windows = list(self._windows(tokenizer, records, self.data.sequence_length))
        return _by_frequency(records, windows, counts)

    def _windows(self, tokenizer: Any, records: pa.Table, length: int) -> Iterator[Piece[Masked]]:
        """Yield each masked window."""
        masking = Masking.by(tokenizer, self.config.training.masking.probability)
        split = partial(text_windows, tokenizer, length=length)
        for row, ids, seeds in _seeded_windows(records, split):
            given, targets = masking.apply(ids, *seeds)
            yield row, (given, targets), targets[targets != IGNORED]


@torch.inference_mode()
def _losses(model: torch.nn.Module, windows: Sequence[Masked], fill: int) -> list[float]:
    device = next(model.parameters()).device
    ids, mask = pad([given.tolist() for given, _ in windows], fill)
    wanted, _ = pad([targets.tolist() for _, targets in windows], IGNORED)
    wanted = wanted.to(device)
    logits = model(input_ids=ids.to(device), attention_mask=mask.to(device)).logits
    return _summed(logits, wanted, wanted != IGNORED)
