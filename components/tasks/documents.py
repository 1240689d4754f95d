"""A model of Transformers whose attention is told the documents of a packed row.

An attention function of our own by Transformers' interface. The documents come to it as a keyword
argument of the model's forward pass, as what is recomputed gets it too. Without them it is
Transformers' attention by PyTorch's kernels, masks included.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any, Final

import torch

from steadytrain.components.tasks.document_attention import Documents, attend
from steadytrain.components.tasks.judged import judged

_NAME: Final = "steadytrain_documents"
_REPLACED: Final = "sdpa"
"""Transformers' default. Any other one somebody has chosen, or the model needs it."""
_FIRST, _SECOND = 6, 5
"""Tokens of the documents with which a model is asked."""

_told: ContextVar[Documents | None] = ContextVar("_told", default=None)


@contextlib.contextmanager
def telling(documents: Documents | None) -> Iterator[dict[str, Any]]:
    """Within, no masks are made for these documents; what is given goes to the model."""
    token = _told.set(documents)
    try:
        yield {} if documents is None else {"documents": documents}
    finally:
        _told.reset(token)


def attend_by_document(model: Any, vocabulary: int) -> str:
    """Has a model's attention work a document at a time, where it does the same then.

    Adapters must be there already. The model's `config.json` stays as it is.

    Args:
        vocabulary: number of the model's token ids.

    Returns:
        Why it cannot; empty: it does.
    """
    config = getattr(model, "config", None)
    chosen = getattr(config, "_attn_implementation", None)
    if chosen != _REPLACED:
        return f"its attention is {chosen!r}"
    if next(model.parameters()).is_meta:
        _use(model, _NAME)
        return ""
    alone = _alone(model, vocabulary)
    _use(model, _NAME)
    why = _refusal(model, vocabulary, alone)
    if why:
        _use(model, _REPLACED)
    return why


def _use(model: Any, name: str) -> None:
    """Adapters pass on what they do not have; the whole model must be asked, not its like."""
    _register()
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    base.set_attn_implementation(name)


def _register() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(_NAME, _attention)
    AttentionMaskInterface.register(_NAME, _mask)


def _mask(*args: Any, **given: Any) -> torch.Tensor | None:
    """As Transformers asks for it, once a forward pass and kind of layers."""
    from transformers.masking_utils import sdpa_mask

    documents = _told.get()
    if documents is None:
        mask: torch.Tensor | None = sdpa_mask(*args, **given)
        return mask
    if given.get("use_vmap") or given.get("attention_mask") is not None:
        raise ValueError("its masks are its own")
    documents.asked.add(given.get("local_size"))
    return None


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    documents: Documents | None = None,
    **given: Any,
) -> tuple[torch.Tensor, None]:
    """As Transformers calls it, once a layer."""
    if documents is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        found: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **given
        )
        return found
    for name in ("softcap", "s_aux", "position_bias", "cache"):
        if given.get(name) is not None:
            raise ValueError(f"its attention has {name!r}")
    if attention_mask is not None:
        raise ValueError("its masks are its own")
    window = given.get("sliding_window")
    documents.seen.add(window)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    result = attend(query, key, value, documents, scale=scale, dropout=dropout, window=window)
    return result, None


def _alone(model: torch.nn.Module, vocabulary: int) -> torch.Tensor:
    """Logits of two documents, each in a pass of its own."""
    with judged(model):
        return torch.cat(
            [
                model(input_ids=ids[None], use_cache=False).logits[0]
                for ids in _examples(model, vocabulary)
            ]
        )


def _refusal(model: torch.nn.Module, vocabulary: int, alone: torch.Tensor) -> str:
    """Asked of the model itself: layers may mix documents by other ways than attention."""
    ids = torch.cat(_examples(model, vocabulary))[None]
    positions = torch.cat([torch.arange(_FIRST), torch.arange(_SECOND)])[None].to(ids.device)
    documents = Documents([_FIRST, _SECOND])
    try:
        with judged(model), telling(documents) as told:
            together = model(input_ids=ids, position_ids=positions, use_cache=False, **told).logits
    except (TypeError, ValueError, RuntimeError, IndexError) as error:
        return str(error)
    if not documents.seen:
        return "its attention is not told of documents"
    if documents.seen - {None} != documents.asked - {None}:
        return "its layers do not tell the windows of their masks"
    if (together[0] - alone).abs().max() > 1e-4 * alone.abs().max():
        return "its layers mix documents"
    return ""


def _examples(model: torch.nn.Module, vocabulary: int) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.arange(_FIRST + _SECOND, device=next(model.parameters()).device)
    return ids[:_FIRST] % vocabulary, (ids[_FIRST:] - 3) % vocabulary
