"""Attention in a row whose documents share prefixes: each token sees the tokens above it.

For evaluation only: no gradients and no dropout.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from steadytrain.components.tasks.documents import (
    other_attention,
    pass_documents,
    take_over,
    unlike,
)
from steadytrain.components.tasks.eval_mode import eval_mode
from steadytrain.components.tasks.prefix_tree import Call, TreeRow, calls, touching, tree_rows

_EXAMPLES = ([3, 1, 4, 1, 5], [3, 1, 4, 1, 6, 2], [3, 1, 4, 0], [2, 7, 1])
"""Sequences that a model is tested with."""


class Tree:
    """A row of shared prefixes. All layers of a forward pass receive the same object.

    asked, seen: the same as in `Documents`.
    """

    def __init__(self, row: TreeRow, device: torch.device) -> None:
        self.asked: set[int | None] = set()
        self.seen: set[int | None] = set()
        self._calls = calls(row.ends)
        self._depths = torch.from_numpy(row.depths).to(device)
        self._ends = torch.from_numpy(row.ends).to(device)
        self._masks: dict[tuple[int | None, torch.dtype], list[torch.Tensor | None]] = {}

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
        """Return the attention of each token over the tokens above it.

        Args:
            query: (1, heads, tokens, width).
            key, value: same shape, or with fewer heads, each shared by equally many query heads.
            window: number of tokens that each token sees, including itself. None means all above
                it.

        Returns:
            (1, tokens, heads, width of value).

        Raises:
            ValueError: the row does not match this tree, or dropout is not 0.
        """
        if query.shape[0] != 1 or query.shape[2] != len(self._depths) or dropout:
            raise ValueError(
                f"{tuple(query.shape)} is not the shape of {len(self._depths)} tokens in a row"
            )
        times = query.shape[1] // key.shape[1]
        if times > 1:
            key, value = (item.repeat_interleave(times, 1) for item in (key, value))
        result = query.new_empty(1, query.shape[2], query.shape[1], value.shape[-1])
        for call, mask in zip(self._calls, self._masks_of(window, query.dtype), strict=True):
            found = functional.scaled_dot_product_attention(
                query[:, :, call.start : call.stop],
                _part(key, call),
                _part(value, call),
                attn_mask=mask,
                is_causal=mask is None,
                scale=scale,
            )
            result[:, call.start : call.stop] = found.transpose(1, 2)
        return result

    def _masks_of(self, window: int | None, dtype: torch.dtype) -> list[torch.Tensor | None]:
        """Return the mask of each call. None means causal. Masks are made once for all layers."""
        if window is not None and window > int(self._depths.max()):
            window = None
        if (window, dtype) not in self._masks:
            self._masks[window, dtype] = [self._mask(call, window, dtype) for call in self._calls]
        return self._masks[window, dtype]

    def _mask(self, call: Call, window: int | None, dtype: torch.dtype) -> torch.Tensor | None:
        """Return 0 where a token sees another one, and minus infinity elsewhere.

        The shape is (own tokens, tokens before and own tokens). None means causal.
        """
        own = torch.arange(call.start, call.stop, device=self._ends.device)
        # If nothing forks within the call, all its tokens are above its last one.
        straight = bool((self._ends[call.start : call.stop] >= call.stop).all())
        if not call.before and window is None and straight:
            return None
        before = [torch.arange(*span, device=own.device) for span in call.before]
        seen = torch.cat([*before, own])
        hidden = (seen > own[:, None]) | (self._ends[seen] <= own[:, None])
        if window is not None:
            hidden |= self._depths[own][:, None] - self._depths[seen] >= window
        return torch.zeros(hidden.shape, dtype=dtype, device=own.device).masked_fill_(
            hidden, -torch.inf
        )


def _part(item: torch.Tensor, call: Call) -> torch.Tensor:
    """Return the keys or values that a call sees."""
    spans = [*call.before, (call.start, call.stop)]
    if touching(spans):
        return item[:, :, spans[0][0] : call.stop]
    return torch.cat([item[:, :, start:stop] for start, stop in spans], 2)


def attend_by_prefix(model: Any, vocabulary: int) -> str:
    """Make a model's attention work on shared prefixes, if its outputs stay the same.

    Args:
        vocabulary: number of the model's token ids.

    Returns:
        The reason why it cannot. Empty means that it does.
    """
    if why := other_attention(model):
        return why
    sequences = [[token % vocabulary for token in example] for example in _EXAMPLES]
    with eval_mode(model):
        alone = [_alone(model, sequence) for sequence in sequences]
        return take_over(model, lambda: _refusal(model, sequences, alone))


def _refusal(model: Any, sequences: list[list[int]], alone: list[torch.Tensor]) -> str:
    """Test the model itself, because layers may mix tokens in other ways than attention."""
    (row,) = tree_rows(sequences, 100)
    tree = Tree(row, alone[0].device)
    try:
        together = row_logits(model, row, tree)[0]
    except (TypeError, ValueError, RuntimeError, IndexError) as error:
        return str(error)
    if why := unlike(tree):
        return why
    for member, places in zip(row.members, row.places, strict=True):
        own = alone[member]
        differing = (together[torch.from_numpy(places).to(own.device)] - own).abs().max()
        if differing > (1e-4 if own.dtype == torch.float32 else 3e-2) * own.abs().max():
            return "its layers mix continuations that share a prefix"
    return ""


def _alone(model: Any, sequence: list[int]) -> torch.Tensor:
    ids = torch.tensor([sequence], device=next(model.parameters()).device)
    logits: torch.Tensor = model(input_ids=ids, use_cache=False).logits[0]
    return logits


def row_logits(model: Any, row: TreeRow, tree: Tree) -> torch.Tensor:
    """Return the model's logits of a row, (1, tokens, vocabulary)."""
    device = next(model.parameters()).device
    ids, depths = (torch.from_numpy(item)[None].to(device) for item in (row.tokens, row.depths))
    with pass_documents(tree) as extra:
        logits: torch.Tensor = model(
            input_ids=ids, position_ids=depths, use_cache=False, **extra
        ).logits
    return logits
