"""From packed rows to the tensors of a micro-batch.

A packed row holds whole documents (or windows of long ones) one after another:
`input_ids` (int32), `targets` (1 where a token is to be predicted from those
before it), and `lengths` (int32), the tokens of each document.

All documents of a micro-batch come to lie in one row without padding, for attention that is told
their lengths (`documents.py`). For other attention each packed row is a row of the micro-batch:
there too it stays inside each document, because positions begin anew with each, and Transformers
derives its block-diagonal causal mask from them where no other mask is given. Padding is one more
document, which nothing looks at.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from steadytrain.components.tasks.base import Batch, Row
from steadytrain.components.tasks.judged import judged

IGNORED = -100
"""Target of a place where nothing is to be predicted, as PyTorch's cross-entropy has it."""

Tokens = npt.NDArray[np.int64]


def collate_packed(rows: Sequence[Row]) -> Batch:
    """A micro-batch of packed rows in one row, without padding.

    Returns:
        `input_ids`, `position_ids` and `targets`, each (1, tokens) of int64, as `collate_rows`
        has them; `lengths` (documents) of int32.
    """
    ids, positions, targets = (
        torch.from_numpy(np.concatenate(parts))[None]
        for parts in zip(*map(_packed, rows), strict=True)
    )
    lengths = np.concatenate([np.asarray(row["lengths"], dtype=np.int32) for row in rows])
    return {
        "input_ids": ids,
        "position_ids": positions,
        "targets": targets,
        "lengths": torch.from_numpy(lengths),
    }


def collate_rows(rows: Sequence[Row], pad_token_id: int) -> Batch:
    """A micro-batch of packed rows, padded to the longest.

    Returns:
        `input_ids`, `position_ids` and `targets`, each (rows, longest) of int64;
        a target is the token that follows, IGNORED where that is not to be predicted.
    """
    return _stack([_packed(row) for row in rows], pad_token_id)


def collate_apart(rows: Sequence[Row], pad_token_id: int) -> Batch:
    """The same documents, each in a row of its own, for models that cannot keep them apart.

    Returns:
        As `collate_rows`, with `attention_mask` (1 for tokens, 0 for padding) added.
    """
    documents = [document for row in rows for document in _documents(row)]
    batch = _stack(documents, pad_token_id)
    lengths = torch.tensor([[len(ids)] for ids, _, _ in documents])
    batch["attention_mask"] = (torch.arange(batch["input_ids"].shape[1]) < lengths).long()
    return batch


def _packed(row: Row) -> tuple[Tokens, Tokens, Tokens]:
    ids, positions, targets = zip(*_documents(row), strict=True)
    return np.concatenate(ids), np.concatenate(positions), np.concatenate(targets)


def _documents(row: Row) -> Iterable[tuple[Tokens, Tokens, Tokens]]:
    """Tokens, positions and targets of each document of a row."""
    ids = np.asarray(row["input_ids"], dtype=np.int64)
    wanted = np.asarray(row["targets"], dtype=bool)
    start = 0
    for length in map(int, row["lengths"]):
        document = ids[start : start + length]
        following = np.full(length, IGNORED, dtype=np.int64)
        following[:-1] = np.where(wanted[start + 1 : start + length], document[1:], IGNORED)
        yield document, np.arange(length), following
        start += length


def _stack(rows: Sequence[tuple[Tokens, Tokens, Tokens]], pad_token_id: int) -> Batch:
    longest = max(len(ids) for ids, _, _ in rows)
    batch = {
        "input_ids": torch.full((len(rows), longest), pad_token_id),
        "position_ids": torch.zeros((len(rows), longest), dtype=torch.int64),
        "targets": torch.full((len(rows), longest), IGNORED),
    }
    for index, (ids, positions, targets) in enumerate(rows):
        end = len(ids)
        batch["input_ids"][index, :end] = torch.from_numpy(ids)
        batch["position_ids"][index, :end] = torch.from_numpy(positions)
        batch["position_ids"][index, end:] = torch.arange(longest - end)
        batch["targets"][index, :end] = torch.from_numpy(targets)
    return batch


def keeps_documents_apart(model: torch.nn.Module, vocabulary: int) -> bool:
    """Whether a document's logits are the same packed behind another as alone.

    Asked of the model itself, because it depends on the architecture (recurrent
    layers, positions that are not given) and on the attention in use.

    Args:
        vocabulary: number of the model's token ids.
    """
    first, second = torch.arange(6) % vocabulary, torch.arange(3, 8) % vocabulary
    device = next(model.parameters()).device
    pair = torch.cat([first, second]).repeat(2, 1).to(device)
    positions = torch.cat([torch.arange(6), torch.arange(5)]).repeat(2, 1).to(device)
    try:
        with judged(model):
            together = model(input_ids=pair, position_ids=positions, use_cache=False).logits[:, 6:]
            alone = model(input_ids=second[None].to(device), use_cache=False).logits
    except (TypeError, ValueError):
        return False
    return bool((together - alone).abs().max() <= 1e-4 * alone.abs().max())
