"""Store the frozen parts outside the layers in less device memory.

With linear layers in 4 bits, the embeddings and head are the largest part of a model with a large
vocabulary: 2.1 of 5.9 GB in Llama-3.1-8B.
"""

from __future__ import annotations

import math
from typing import Any, Final

import torch

from steadytrain.components.shared.config import AdapterConfig
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.tasks.auxiliary import Auxiliary
from steadytrain.components.tasks.chunks import check_head_width
from steadytrain.components.tasks.frozen_head import FrozenHead
from steadytrain.components.tasks.host_embedding import HostEmbedding
from steadytrain.components.tasks.quantized import QuantizedMatrix

_ON_HOST: Final = "model.adapter.frozen_embeddings = 'host'"


def lighten(model: Any, adapter: AdapterConfig) -> None:
    """Move the embeddings to the host and quantize the head, as configured.

    Calling it again changes nothing.

    Raises:
        BadInput: the model has no such parts, or they don't support this.
    """
    if not adapter.lightened:
        return
    embedding, head = _part(model, "get_input_embeddings"), _part(model, "get_output_embeddings")
    host = adapter.frozen_embeddings == "host" and not isinstance(embedding, HostEmbedding)
    bits = "as_loaded" if isinstance(head, FrozenHead) else adapter.frozen_head
    if not host and bits == "as_loaded":
        return
    outside = {id(part.weight) for part in (embedding, head) if hasattr(part, "weight")}
    inside = next(item for item in model.parameters() if id(item) not in outside)
    if host:
        _check_embedding(embedding)
    if host and bits == "as_loaded" and _are_one(model, embedding, head):
        raise BadInput(
            f"{_ON_HOST}: the head is the same table and would keep it on the device",
            remedy="set model.adapter.frozen_head to 8bit or 4bit, or frozen_embeddings to device",
        )
    if bits != "as_loaded":
        _check_head(head, bits)
        _replace(model, head, FrozenHead(head, bits, inside.device))
    if host:
        _replace(model, embedding, HostEmbedding(embedding))


def _part(model: Any, getter: str) -> Any:
    """Return a part of the model. None means that a user-defined model has no such part."""
    return getattr(model, getter)() if hasattr(model, getter) else None


def parameter_count(model: torch.nn.Module) -> int:
    """Return the number of values in the full model, whatever their bits and wherever they are."""
    apart = [part for part in model.modules() if isinstance(part, QuantizedMatrix | HostEmbedding)]
    packed = {id(item) for part in apart for item in part.parameters()}
    packed |= {
        id(item)
        for part in model.modules()
        if isinstance(part, Auxiliary)
        for item in part.parameters()
    }
    # bitsandbytes keeps the original shape of packed layers.
    shapes = [
        item.quant_state.shape if hasattr(item, "quant_state") else item.shape
        for item in model.parameters()
        if id(item) not in packed
    ]
    shapes += [part.shape for part in apart]
    return sum(map(math.prod, shapes))


def tied_tables(model: Any) -> set[str]:
    """Return the names of embeddings and head if they share one table, else nothing."""
    embedding, head = _part(model, "get_input_embeddings"), _part(model, "get_output_embeddings")
    if embedding is None or not _are_one(model, embedding, head):
        return set()
    return {name for name, child in model.named_modules() if child is embedding or child is head}


def _check_embedding(embedding: Any) -> None:
    if type(embedding) is not torch.nn.Embedding or embedding.max_norm is not None:
        raise BadInput(
            f"{_ON_HOST}: the model's embeddings are not a plain table but {_kind(embedding)}",
            remedy="set it to device",
        )


def _are_one(model: Any, embedding: Any, head: Any) -> bool:
    """Return whether the embeddings and the head share one table.

    Tied weights that were loaded to the host are two parameters with one tensor. A part that was
    moved to the host or quantized has no `weight`, and shares nothing.
    """
    tied = bool(getattr(model.config, "tie_word_embeddings", False))
    table = getattr(embedding, "weight", embedding)
    return head is not None and (tied or getattr(head, "weight", head) is table)


def _check_head(head: Any, bits: str) -> None:
    if type(head) is not torch.nn.Linear:
        raise BadInput(
            f"model.adapter.frozen_head = {bits!r}: the model's head is not a plain linear "
            f"layer but {_kind(head)}",
            remedy="leave it out",
        )
    check_head_width(head.in_features, bits)


def _kind(part: Any) -> str:
    return "None" if part is None else f"{type(part).__module__}.{type(part).__name__}"


def _replace(model: torch.nn.Module, old: torch.nn.Module, new: torch.nn.Module) -> None:
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if child is old:
                setattr(parent, name, new)
