"""Token sequences with common prefixes, as a tree in one row: each shared token is stored once.

The tokens of a row are in depth-first order. The tokens below a token follow it directly, so
attention for many tokens works on contiguous spans. Sorting the sequences produces this order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

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
        differing = (place for place, (one, other) in enumerate(pairs) if one != other)
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
        for place in self._path[shared:]:
            self.ends[place] = len(self.tokens)


def calls(ends: Tokens, apart: int = _APART) -> list[Call]:
    """Group tokens into calls. Each token sees all tokens above it, with little extra work.

    Args:
        apart: subtrees below one token attend in one call if they have at most this many tokens
            together. Otherwise each subtree gets its own call.
    """
    found: list[Call] = []
    _plan(ends.tolist(), 0, len(ends), (), apart, found)
    return found


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
