"""Turn packed rows into the tensors of a micro-batch.

A packed row holds whole documents (or windows of long ones) one after another: `input_ids` (int32),
`targets` (1 if a token is predicted from those before it), and `lengths` (int32), the number of
tokens in each document.

For attention that receives the document lengths (`documents.py`), all documents of a micro-batch
are in one row without padding. For other attention, each packed row is a row of the micro-batch.
Attention still stays within each document: positions restart with each one, and Transformers
derives its block-diagonal causal mask from them if it gets no other mask. Padding is one more
document, which no other document attends to.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from steadytrain.components.tasks.base import Batch, Row
from steadytrain.components.techniques.base import IGNORED
from steadytrain.components.techniques.inference import eval_mode

Tokens = npt.NDArray[np.int64]


def collate_packed(rows: Sequence[Row]) -> Batch:
    """Return a micro-batch of packed rows as one row, without padding.

    Returns:
        `input_ids`, `position_ids` and `targets`, each (1, tokens) of int64, with the same meaning
        as in `collate_rows`; `lengths`, the number of tokens in each document, as plain numbers.
    """
    ids, positions, targets = (
        torch.from_numpy(np.concatenate(parts))[None]
        for parts in zip(*map(_packed, rows), strict=True)
    )
    return {
        "input_ids": ids,
        "position_ids": positions,
        "targets": targets,
        "lengths": [int(length) for row in rows for length in row["lengths"]],
    }


def collate_rows(rows: Sequence[Row], pad_token_id: int) -> Batch:
    """Return a micro-batch of packed rows, padded to the longest.

    Returns:
        `input_ids`, `position_ids` and `targets`, each (rows, longest) of int64. A target is the
        next token, or IGNORED if that one is not predicted.
    """
    return _stack([_packed(row) for row in rows], pad_token_id)


def collate_apart(rows: Sequence[Row], pad_token_id: int) -> Batch:
    """Return the same documents, one per row, for models that cannot keep packed ones apart.

    Returns:
        The same as `collate_rows`, plus `attention_mask` (1 for tokens, 0 for padding).
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
    """Yield the tokens, positions and targets of each document in a row.

    Raises:
        ValueError: the document lengths don't add up to the number of tokens.
    """
    ids = np.asarray(row["input_ids"], dtype=np.int64)
    wanted = np.asarray(row["targets"], dtype=bool)
    lengths = [int(length) for length in row["lengths"]]
    # With a corrupted length, NumPy would allocate gigabytes.
    if sum(lengths) != len(ids) or min(lengths, default=0) < 0:
        raise ValueError(f"documents of {lengths} tokens do not make a row of {len(ids)}")
    start = 0
    for length in lengths:
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
    """Return whether a document's logits are the same packed after another document as alone.

    This runs the model itself, because the answer depends on the architecture (recurrent layers,
    positions that are not passed in) and on the attention implementation.

    Args:
        vocabulary: number of the model's token ids.
    """
    first, second = torch.arange(6) % vocabulary, torch.arange(3, 8) % vocabulary
    device = next(model.parameters()).device
    if device.type == "meta":
        # There are no values to compare.
        return False
    pair = torch.cat([first, second]).repeat(2, 1).to(device)
    positions = torch.cat([torch.arange(6), torch.arange(5)]).repeat(2, 1).to(device)
    try:
        with eval_mode(model):
            together = model(input_ids=pair, position_ids=positions, use_cache=False).logits[:, 6:]
            alone = model(input_ids=second[None].to(device), use_cache=False).logits
    except (TypeError, ValueError):
        return False
    return bool((together - alone).abs().max() <= 1e-4 * alone.abs().max())
