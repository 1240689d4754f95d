"""Attention of packed documents, each by itself: nothing is computed or kept between two of them.

All documents of a micro-batch lie in one row, (1, heads, tokens, width). On a CPU the fused kernel
is called a document at a time, beneath one step of autograd: by `torch.split`, attention and
`torch.cat` of each, autograd takes half as long again. Documents of equal length are not put
together: from some tens of tokens on a call costs little beside its work.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any, Final

import torch
from torch.nn import functional

_SHORT: Final = 256
"""Tokens up to which the CPU's kernel goes backward faster in 32 bits than in 16: 2 to 8 times as
fast with 120, half as fast with 500 (measured with AMX, 32 to 128 values a head)."""

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class Documents:
    """The documents of a packed row. All layers of a forward pass are given the same object.

    asked: windows of the masks that the model has asked for; None: a plain causal one.
    seen: windows that its layers have given with queries and keys.
    """

    def __init__(self, lengths: Sequence[int]) -> None:
        self.lengths = list(lengths)
        self.asked: set[int | None] = set()
        self.seen: set[int | None] = set()
        self._ends: torch.Tensor | None = None

    def parts(self, *items: torch.Tensor) -> Iterator[Sequence[torch.Tensor]]:
        """Of each document its part of each item, (1, heads, tokens, width)."""
        return zip(*(torch.split(item, self.lengths, 2) for item in items), strict=True)

    def ends(self, device: torch.device) -> torch.Tensor:
        """0, and where each document ends; int32."""
        if self._ends is None:
            ends = list(accumulate(self.lengths, initial=0))
            self._ends = torch.tensor(ends, dtype=torch.int32, device=device)
        return self._ends


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    documents: Documents,
    *,
    scale: float,
    dropout: float = 0.0,
    window: int | None = None,
) -> torch.Tensor:
    """Causal attention within each document.

    Args:
        query: (1, heads, tokens, width). key, value: the same, or with fewer heads, each for as
            many of the query's as there are more of those.
        window: tokens that each one sees, itself included; None: all before it.

    Returns:
        (1, tokens, heads, width of value), in the type of autocast where that is on.

    Raises:
        ValueError: the row is not of these documents.
    """
    if query.shape[0] != 1 or query.shape[2] != sum(documents.lengths):
        raise ValueError(f"{tuple(query.shape)} are no {sum(documents.lengths)} tokens in a row")
    device = query.device.type
    # The meta device knows no autocast.
    half = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    dtype = torch.get_autocast_dtype(device) if half else query.dtype
    query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    fused = not dropout and query.shape[-1] == value.shape[-1]
    if fused and device == "cpu":
        found: torch.Tensor = _Attention.apply(query, key, value, documents, scale, window)
        return found
    if fused and device == "cuda" and _has_kernel(query):
        return _of_varying_length(query, key, value, documents, scale, window)
    return _one_by_one(query, key, value, documents, scale, dropout, window)


class _Attention(torch.autograd.Function):
    """Keeps queries, keys, values, the result, and a sum a token and head."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        documents: Documents,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        _, heads, tokens, width = query.shape
        result = query.new_empty(1, tokens, heads, width)
        sums = []
        for place, *own in documents.parts(result.transpose(1, 2), query, key, value):
            given = (_repeated(item, heads) for item in own)
            found, summed = _forward(*given, scale=scale, **_seen(place.shape[2], window, query))
            place.copy_(found)
            sums.append(summed)
        ctx.save_for_backward(query, key, value, result, *sums)
        ctx.documents, ctx.scale, ctx.window = documents, scale, window
        return result

    @staticmethod
    def backward(ctx: Any, *outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, result, *sums = ctx.saved_tensors
        heads = query.shape[1]
        gradients = [torch.empty_like(item) for item in (query, key, value)]
        given = (outputs[0].transpose(1, 2), query, key, value, result.transpose(1, 2))
        parts = zip(ctx.documents.parts(*gradients), ctx.documents.parts(*given), sums, strict=True)
        for places, own, summed in parts:
            length = own[0].shape[2]
            own = [_repeated(item, heads) for item in own]
            if length <= _SHORT:
                own = [item.float() for item in own]
            seen = _seen(length, ctx.window, own[0])
            found = _backward(*own, summed, scale=ctx.scale, **seen)
            for place, part in zip(places, found, strict=True):
                place.copy_(_added_up(part, place.shape[1]))
        return (*gradients, None, None, None)


def _seen(length: int, window: int | None, like: torch.Tensor) -> dict[str, Any]:
    """What each token of a document sees, as the CPU's kernel takes it."""
    if window is None or length <= window:
        return {"dropout_p": 0.0, "is_causal": True}
    return {"dropout_p": 0.0, "is_causal": False, "attn_mask": _band(length, window, like)}


def _band(length: int, window: int, like: torch.Tensor) -> torch.Tensor:
    """0 where a token sees another, else minus infinity; (length, length)."""
    hidden = torch.ones(length, length, dtype=torch.bool, device=like.device)
    hidden = hidden.triu(1) | hidden.tril(-window)
    return torch.zeros_like(hidden, dtype=like.dtype).masked_fill_(hidden, -torch.inf)


def _repeated(item: torch.Tensor, heads: int) -> torch.Tensor:
    """With as many heads as the query has."""
    times = heads // item.shape[1]
    return item if times == 1 else item.repeat_interleave(times, 1)


def _added_up(gradient: torch.Tensor, heads: int) -> torch.Tensor:
    """Of the heads that were repeated."""
    times = gradient.shape[1] // heads
    return gradient if times == 1 else torch.unflatten(gradient, 1, (heads, times)).sum(2)


def _one_by_one(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    documents: Documents,
    scale: float,
    dropout: float,
    window: int | None,
) -> torch.Tensor:
    """By PyTorch's own attention: with dropout, or where no other kernel is."""
    found = []
    for own_query, own_key, own_value in documents.parts(query, key, value):
        length = own_query.shape[2]
        banded = window is not None and length > window
        result = functional.scaled_dot_product_attention(
            own_query,
            own_key,
            own_value,
            attn_mask=_band(length, window, own_query) if window and banded else None,
            dropout_p=dropout,
            is_causal=not banded,
            scale=scale,
            enable_gqa=key.shape[1] != query.shape[1],
        )
        found.append(result.transpose(1, 2))
    return torch.cat(found, 1)


def _has_kernel(query: torch.Tensor) -> bool:
    """Whether FlashAttention 2, which PyTorch brings, runs there: from Ampere on, in 16 bits."""
    half = query.dtype in (torch.float16, torch.bfloat16)
    width = query.shape[-1]
    fits = half and width % 8 == 0 and width <= 256
    return fits and torch.cuda.get_device_capability(query.device) >= (8, 0)


def _of_varying_length(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    documents: Documents,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    """By the kernels of CUDA for documents of varying length, in 16 bits."""
    from torch.nn.attention.varlen import varlen_attn

    ends, longest = documents.ends(query.device), max(documents.lengths)
    own_query, own_key, own_value = (item[0].transpose(0, 1) for item in (query, key, value))
    result = varlen_attn(
        own_query,
        own_key,
        own_value,
        ends,
        ends,
        longest,
        longest,
        scale=scale,
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=key.shape[1] != query.shape[1],
    )
    assert isinstance(result, torch.Tensor)  # no sums were asked for
    return result[None]
