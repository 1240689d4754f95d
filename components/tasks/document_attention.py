"""Attention within each document of a packed row. Nothing is computed or stored across documents.

All documents of a micro-batch are in one row, (1, heads, tokens, width). On a CPU, the fused kernel
is called once per document, within a single autograd step: with `torch.split`, attention and
`torch.cat` per document, autograd takes one and a half times as long. Documents of equal length are
not batched, because from a few dozen tokens on, a call costs little compared with its work.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any, Final

import torch
from torch.nn import functional

from steadytrain.components.tasks.loaded_weights import product_type

_SHORT: Final = 256
"""Longest documents, in tokens, for which the CPU kernel's backward runs in 32 bits.

That is 2 to 8 times as fast as 16 bits with 120 tokens, and half as fast with 500 (measured with
AMX, 32 to 128 values per head).
"""

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class Documents:
    """The documents of a packed row. All layers of a forward pass receive the same object.

    requested: windows of the masks that the model requested. None means a plain causal mask.
    seen: windows that its layers passed along with queries and keys.
    """

    def __init__(self, lengths: Sequence[int]) -> None:
        self.lengths = list(lengths)
        self.requested: set[int | None] = set()
        self.seen: set[int | None] = set()
        self._ends: torch.Tensor | None = None

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
        """Return causal attention within each document.

        Args:
            query: (1, heads, tokens, width).
            key, value: same shape, or with fewer heads, each shared by equally many query heads.
            window: number of tokens that each token sees, including itself. None means all before
                it.

        Returns:
            (1, tokens, heads, width of value), in autocast's dtype if autocast is on.

        Raises:
            ValueError: the row does not match these documents.
        """
        if query.shape[0] != 1 or query.shape[2] != sum(self.lengths):
            raise ValueError(
                f"{tuple(query.shape)} is not the shape of {sum(self.lengths)} tokens in a row"
            )
        device, dtype = query.device.type, product_type(query.device, query.dtype)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
        fused = not dropout and query.shape[-1] == value.shape[-1]
        if fused and device == "cpu":
            result: torch.Tensor = _Attention.apply(query, key, value, self, scale, window)
            return result
        if fused and device == "cuda" and _has_kernel(query):
            return _of_varying_length(query, key, value, self, scale, window)
        return _one_by_one(query, key, value, self, scale, dropout, window)

    def parts(self, *items: torch.Tensor) -> Iterator[Sequence[torch.Tensor]]:
        """Yield, for each document, its part of each item, (1, heads, tokens, width)."""
        return zip(*(torch.split(item, self.lengths, 2) for item in items), strict=True)

    def ends(self, device: torch.device) -> torch.Tensor:
        """Return 0, followed by the end position of each document; int32."""
        if self._ends is None:
            ends = list(accumulate(self.lengths, initial=0))
            self._ends = torch.tensor(ends, dtype=torch.int32, device=device)
        return self._ends


class _Attention(torch.autograd.Function):
    """Keeps queries, keys, values, the result, and one sum per token and head."""

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
        for output, *inputs in documents.parts(result.transpose(1, 2), query, key, value):
            repeated = (_repeated(item, heads) for item in inputs)
            seen = _seen(output.shape[2], window, query)
            attended, summed = _forward(*repeated, scale=scale, **seen)
            output.copy_(attended)
            sums.append(summed)
        ctx.save_for_backward(query, key, value, result, *sums)
        ctx.documents, ctx.scale, ctx.window = documents, scale, window
        return result

    @staticmethod
    def backward(ctx: Any, *outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, result, *sums = ctx.saved_tensors
        heads = query.shape[1]
        gradients = [torch.empty_like(item) for item in (query, key, value)]
        saved = (outputs[0].transpose(1, 2), query, key, value, result.transpose(1, 2))
        parts = zip(ctx.documents.parts(*gradients), ctx.documents.parts(*saved), sums, strict=True)
        for slots, inputs, summed in parts:
            length = inputs[0].shape[2]
            inputs = [_repeated(item, heads) for item in inputs]
            if length <= _SHORT:
                inputs = [item.float() for item in inputs]
            seen = _seen(length, ctx.window, inputs[0])
            for slot, part in zip(
                slots, _backward(*inputs, summed, scale=ctx.scale, **seen), strict=True
            ):
                slot.copy_(_added_up(part, slot.shape[1]))
        return (*gradients, None, None, None)


def _seen(length: int, window: int | None, like: torch.Tensor) -> dict[str, Any]:
    """Return what each token of a document sees, as arguments of the CPU kernel."""
    if window is None or length <= window:
        return {"dropout_p": 0.0, "is_causal": True}
    return {"dropout_p": 0.0, "is_causal": False, "attn_mask": _band(length, window, like)}


def _band(length: int, window: int, like: torch.Tensor) -> torch.Tensor:
    """Return 0 where a token sees another one, and minus infinity elsewhere; (length, length)."""
    hidden = torch.ones(length, length, dtype=torch.bool, device=like.device)
    hidden = hidden.triu(1) | hidden.tril(-window)
    return torch.zeros_like(hidden, dtype=like.dtype).masked_fill_(hidden, -torch.inf)


def _repeated(item: torch.Tensor, heads: int) -> torch.Tensor:
    """Repeat the heads to as many as the query has."""
    times = heads // item.shape[1]
    return item if times == 1 else item.repeat_interleave(times, 1)


def _added_up(gradient: torch.Tensor, heads: int) -> torch.Tensor:
    """Sum the gradients of the repeated heads."""
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
    """Use PyTorch's own attention: with dropout, or if no other kernel is available."""
    results = []
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
        results.append(result.transpose(1, 2))
    return torch.cat(results, 1)


def _has_kernel(query: torch.Tensor) -> bool:
    """Return whether PyTorch's FlashAttention 2 runs here: on Ampere or newer, in 16 bits."""
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
    """Use CUDA's kernels for documents of varying length, in 16 bits."""
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
    assert isinstance(result, torch.Tensor)  # no log-sum-exp was requested
    return result[None]
