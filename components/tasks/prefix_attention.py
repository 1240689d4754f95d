"""Attention in a row whose documents share prefixes: each token sees the tokens above it.

For evaluation only: no gradients and no dropout.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from steadytrain.components.tasks.documents import (
    other_attention,
    pass_documents,
    take_over,
    unlike,
)
from steadytrain.components.techniques.modules import eval_mode

# Token sequences with common prefixes, as a tree in one row: each shared token is stored once.
#
# The tokens of a row are in depth-first order. The tokens below a token follow it directly, so
# attention for many tokens works on contiguous spans. Sorting the sequences produces this order.

Tokens = npt.NDArray[np.int64]

_APART = 96


@dataclass(frozen=True)
class TreeRow:
    """Some sequences, with shared prefixes stored once.

    tokens: (tokens,).
    depths: (tokens,), the position of each token in its sequences.
    ends: (tokens,), where the tokens below each token end.
    members: the indices of the sequences.
    places: for each member, the positions of its tokens in the row.
    """

    tokens: Tokens
    depths: Tokens
    ends: Tokens
    members: list[int]
    places: list[Tokens]


@dataclass(frozen=True)
class Call:
    """Tokens that attend together.

    start, stop: their range in the row.
    before: earlier spans that all of them see.
    """

    start: int
    stop: int
    before: tuple[tuple[int, int], ...]


def tree_rows(sequences: Sequence[list[int]], size: int) -> Iterator[TreeRow]:
    """Yield rows of about `size` tokens, or more if one sequence is longer or much is shared.

    A row ends between sequences that share little, and at twice the size in any case.
    """
    order = sorted(range(len(sequences)), key=lambda index: sequences[index])
    row = _Row()
    for index in order:
        sequence = sequences[index]
        shared = row.shared(sequence)
        total = len(row.tokens) + len(sequence) - shared
        if row.members and total > (size if 2 * shared < len(sequence) else 2 * size):
            yield row.finished()
            row, shared = _Row(), 0
        row.add(index, sequence, shared)
    if row.members:
        yield row.finished()


class _Row:
    """A row under construction."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.depths: list[int] = []
        self.ends: list[int] = []
        self.members: list[int] = []
        self.places: list[Tokens] = []
        self._last: Sequence[int] = ()
        self._path: list[int] = []  # positions of the last sequence's tokens

    def shared(self, sequence: Sequence[int]) -> int:
        """Return the length of the common prefix with the last sequence."""
        pairs = zip(self._last, sequence, strict=False)
        differing = (index for index, (one, other) in enumerate(pairs) if one != other)
        return next(differing, min(len(self._last), len(sequence)))

    def add(self, index: int, sequence: Sequence[int], shared: int) -> None:
        self._close(shared)
        begin = len(self.tokens)
        self.tokens += sequence[shared:]
        self.depths += range(shared, len(sequence))
        self.ends += [0] * (len(sequence) - shared)
        self._path[shared:] = range(begin, len(self.tokens))
        self._last = sequence
        self.members.append(index)
        self.places.append(np.array(self._path, dtype=np.int64))

    def finished(self) -> TreeRow:
        self._close(0)
        tokens, depths, ends = (
            np.array(item, dtype=np.int64) for item in (self.tokens, self.depths, self.ends)
        )
        return TreeRow(tokens, depths, ends, self.members, self.places)

    def _close(self, shared: int) -> None:
        for index in self._path[shared:]:
            self.ends[index] = len(self.tokens)


def calls(ends: Tokens, apart: int = _APART) -> list[Call]:
    """Group tokens into calls. Each token sees all tokens above it, with little extra work.

    Args:
        apart: subtrees below one token attend in one call if they have at most this many tokens
            together. Otherwise each subtree gets its own call.
    """
    result: list[Call] = []
    _plan(ends.tolist(), 0, len(ends), (), apart, result)
    return result


def _plan(
    ends: list[int],
    start: int,
    stop: int,
    before: tuple[tuple[int, int], ...],
    apart: int,
    found: list[Call],
) -> None:
    if before and stop - start <= apart:
        found.append(Call(start, stop, before))
        return
    while start < stop:
        end = ends[start]
        fork = start + 1
        while fork < end and ends[fork] == end:
            fork += 1
        found.append(Call(start, fork, before))
        if fork < end:
            _plan(ends, fork, end, _joined((*before, (start, fork))), apart, found)
        start = end


def _joined(spans: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
    """Merge the last two spans if they touch."""
    if len(spans) > 1 and spans[-2][1] == spans[-1][0]:
        return (*spans[:-2], (spans[-2][0], spans[-1][1]))
    return spans


def touching(spans: Sequence[tuple[int, int]]) -> bool:
    """Return whether each span starts where the previous one ends."""
    return all(one[1] == other[0] for one, other in pairwise(spans))


_EXAMPLES = ([3, 1, 4, 1, 5], [3, 1, 4, 1, 6, 2], [3, 1, 4, 0], [2, 7, 1])
"""Sequences that a model is tested with."""


class Tree:
    """A row of shared prefixes. All layers of a forward pass receive the same object.

    asked, seen: the same as in `Documents`.
    """

    def __init__(self, row: TreeRow, device: torch.device) -> None:
        self.requested: set[int | None] = set()
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
            attended = functional.scaled_dot_product_attention(
                query[:, :, call.start : call.stop],
                _part(key, call),
                _part(value, call),
                attn_mask=mask,
                is_causal=mask is None,
                scale=scale,
            )
            result[:, call.start : call.stop] = attended.transpose(1, 2)
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
        queries = torch.arange(call.start, call.stop, device=self._ends.device)
        # If nothing forks within the call, all its tokens are above its last one.
        straight = bool((self._ends[call.start : call.stop] >= call.stop).all())
        if not call.before and window is None and straight:
            return None
        before = [torch.arange(*span, device=queries.device) for span in call.before]
        seen = torch.cat([*before, queries])
        hidden = (seen > queries[:, None]) | (self._ends[seen] <= queries[:, None])
        if window is not None:
            hidden |= self._depths[queries][:, None] - self._depths[seen] >= window
        return torch.zeros(hidden.shape, dtype=dtype, device=queries.device).masked_fill_(
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
        expected = alone[member]
        differing = (together[torch.from_numpy(places).to(expected.device)] - expected).abs().max()
        if differing > (1e-4 if expected.dtype == torch.float32 else 3e-2) * expected.abs().max():
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
