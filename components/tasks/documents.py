"""Packed documents: turn their rows into tensors, and pass them to a model's attention.

A packed row holds whole documents (or windows of long ones) one after another: `input_ids` (int32),
`targets` (1 if a token is predicted from those before it), and `lengths` (int32), the number of
tokens in each document.

Our own attention function is registered through Transformers' interface. The documents reach it as
a keyword argument of the model's forward pass, so activation recomputation receives them too. For
it, all documents of a micro-batch are in one row without padding. Without documents, it is
Transformers' attention with PyTorch's kernels, masks included.

For other attention, each packed row is a row of the micro-batch. Attention still stays within each
document: positions restart with each one, and Transformers derives its block-diagonal causal mask
from them if it gets no other mask. Padding is one more document, which no other document attends
to.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt
import torch

from steadytrain.components.tasks.base import Batch, Row
from steadytrain.components.tasks.document_attention import Documents
from steadytrain.components.techniques.base import IGNORED
from steadytrain.components.techniques.modules import eval_mode

_NAME: Final = "steadytrain_documents"
_REPLACED: Final = "sdpa"
"""Transformers' default. Any other attention was chosen by the user, or the model needs it."""
_FIRST, _SECOND = 6, 5
"""Tokens in the two documents that a model is tested with."""


class Packed(Protocol):
    """The contents of a row and how its tokens attend, such as `Documents`.

    requested: windows of the masks that the model requested. None means a plain causal mask.
    seen: windows that its layers passed along with queries and keys.
    """

    requested: set[int | None]
    seen: set[int | None]

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scale: float,
        dropout: float = 0.0,
        window: int | None = None,
    ) -> torch.Tensor:
        """Return the attention, (1, tokens, heads, width of value)."""


_current: ContextVar[Packed | None] = ContextVar("_current", default=None)


@contextlib.contextmanager
def pass_documents(documents: Packed | None) -> Iterator[dict[str, Any]]:
    """Within this context, no masks are made for these documents.

    Yields the keyword arguments to pass to the model.
    """
    token = _current.set(documents)
    try:
        yield {} if documents is None else {"documents": documents}
    finally:
        _current.reset(token)


def attend_by_document(model: Any, vocabulary: int) -> str:
    """Make a model's attention work on one document at a time, if its outputs stay the same.

    Attach adapters first. The model's `config.json` does not change.

    Args:
        vocabulary: number of the model's token ids.

    Returns:
        The reason why it cannot. Empty means that it does.
    """
    if why := other_attention(model):
        return why
    if next(model.parameters()).is_meta:
        return take_over(model, str)
    alone = _alone(model, vocabulary)
    return take_over(model, lambda: _refusal(model, vocabulary, alone))


def other_attention(model: Any) -> str:
    """Return why our attention cannot replace the model's. Empty means that it can."""
    config = getattr(model, "config", None)
    chosen = getattr(config, "_attn_implementation", None)
    return "" if chosen in (_REPLACED, _NAME) else f"its attention is {chosen!r}"


def take_over(model: Any, refusal: Callable[[], str]) -> str:
    """Give a model our attention, and undo that if `refusal`, called with it in place, objects.

    Returns:
        What `refusal` returns: the reason, or an empty string.
    """
    _use(model, _NAME)
    why = refusal()
    if why:
        _use(model, _REPLACED)
    return why


def unlike(documents: Packed) -> str:
    """Return why the model's layers did not attend as directed. Empty means that they did."""
    if not documents.seen:
        return "its attention does not receive the documents"
    if documents.seen - {None} != documents.requested - {None}:
        return "its layers do not pass the windows of their masks"
    return ""


def _use(model: Any, name: str) -> None:
    """Set the attention implementation of the base model.

    An adapter model forwards attributes that it lacks, so call the base model itself.
    """
    _register()
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    base.set_attn_implementation(name)


def _register() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(_NAME, _attention)
    AttentionMaskInterface.register(_NAME, _mask)


def _mask(*args: Any, **given: Any) -> torch.Tensor | None:
    """Transformers calls this once per forward pass and kind of layer."""
    from transformers.masking_utils import sdpa_mask

    documents = _current.get()
    if documents is None:
        mask: torch.Tensor | None = sdpa_mask(*args, **given)
        return mask
    if given.get("use_vmap") or given.get("attention_mask") is not None:
        raise ValueError("it builds its own masks")
    documents.requested.add(given.get("local_size"))
    return None


# In a compiled graph, the lengths would be constants.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    documents: Packed | None = None,
    **given: Any,
) -> tuple[torch.Tensor, None]:
    """Transformers calls this once per layer."""
    if documents is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        attended: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **given
        )
        return attended
    for name in ("softcap", "s_aux", "position_bias", "cache"):
        if given.get(name) is not None:
            raise ValueError(f"its attention has {name!r}")
    if attention_mask is not None:
        raise ValueError("it builds its own masks")
    window = given.get("sliding_window")
    documents.seen.add(window)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    result = documents.attend(query, key, value, scale=scale, dropout=dropout, window=window)
    return result, None


def _alone(model: torch.nn.Module, vocabulary: int) -> torch.Tensor:
    """Return the logits of the two test documents, each from its own forward pass."""
    with eval_mode(model):
        return torch.cat(
            [
                model(input_ids=ids[None], use_cache=False).logits[0]
                for ids in _examples(model, vocabulary)
            ]
        )


def _refusal(model: torch.nn.Module, vocabulary: int, alone: torch.Tensor) -> str:
    """Test the model itself, because layers may mix documents in other ways than attention."""
    ids = torch.cat(_examples(model, vocabulary))[None]
    positions = torch.cat([torch.arange(_FIRST), torch.arange(_SECOND)])[None].to(ids.device)
    documents = Documents([_FIRST, _SECOND])
    try:
        with eval_mode(model), pass_documents(documents) as extra:
            together = model(input_ids=ids, position_ids=positions, use_cache=False, **extra).logits
    except (TypeError, ValueError, RuntimeError, IndexError) as error:
        return str(error)
    if why := unlike(documents):
        return why
    if (together[0] - alone).abs().max() > 1e-4 * alone.abs().max():
        return "its layers mix documents"
    return ""


def _examples(model: torch.nn.Module, vocabulary: int) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.arange(_FIRST + _SECOND, device=next(model.parameters()).device)
    return ids[:_FIRST] % vocabulary, (ids[_FIRST:] - 3) % vocabulary


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


def collate_documents(rows: Sequence[Row], pad_token_id: int) -> Batch:
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


def isolates_documents(model: torch.nn.Module, vocabulary: int) -> bool:
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
