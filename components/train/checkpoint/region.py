"""A contiguous range of a tensor's elements on one rank, and copying a checkpoint into it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from steadytrain.components.train.checkpoint.manifest import Slice, TensorEntry


@dataclass(frozen=True)
class Region:
    """A range of a tensor's elements, in row-major order, and their place in memory.

    values: these elements, in any layout; writing to them changes the model.
    start: index of the first element in the full tensor.
    size: number of elements of the full tensor.
    """

    values: torch.Tensor
    start: int
    size: int

    @torch.no_grad()
    def fill(self, held: torch.Tensor, begin: int) -> None:
        """Copy the overlap with `held`, elements of the tensor from index `begin` on.

        Args:
            held: of one dimension.
        """
        low, high = self.common(begin, held.numel())
        if low < high:
            _put(self.values, low - self.start, held[low - begin : high - begin])

    def common(self, begin: int, count: int) -> tuple[int, int]:
        """Return start and end of the overlap with `count` elements from `begin` on."""
        return max(self.start, begin), min(self.start + self.values.numel(), begin + count)

    def needs(self, piece: Slice, entry: TensorEntry) -> bool:
        """Return whether a slice contains any of these elements."""
        low, high = self.common(begin_of(piece, entry), math.prod(piece.shape))
        return low < high


Regions = Mapping[str, Region]


def whole(tensor: torch.Tensor) -> Region:
    """Return a region of all elements of a tensor."""
    return Region(tensor.detach(), 0, tensor.numel())


def begin_of(piece: Slice, entry: TensorEntry) -> int:
    """Return the index of a slice's first element in its tensor. A slice consists of full rows."""
    row = math.prod(entry.shape[1:])
    return piece.offsets[0] * row if piece.offsets else 0


def _put(target: torch.Tensor, at: int, part: torch.Tensor) -> None:
    """Copy `part` to the elements of `target` from index `at` on, in row-major order."""
    if target.is_contiguous():
        target.view(-1)[at : at + len(part)].copy_(part)
    elif target.dim() == 1:
        target[at : at + len(part)].copy_(part)
    else:
        # A transposed weight, for example.
        row, end = target[0].numel(), at + len(part)
        for index in range(at // row, -(-end // row)):
            low, high = max(at, index * row), min(end, (index + 1) * row)
            _put(target[index], low - index * row, part[low - at : high - at])
