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

    values: one-dimensional view; writing to it changes the model.
    start: index of the first element in the full tensor.
    size: number of elements of the full tensor.
    """

    values: torch.Tensor
    start: int
    size: int

    @torch.no_grad()
    def fill(self, held: torch.Tensor, begin: int) -> None:
        """Copy the overlap with `held`, elements of the tensor from index `begin` on."""
        low, high = self.common(begin, held.numel())
        if low < high:
            part = held.reshape(-1)[low - begin : high - begin]
            self.values[low - self.start : high - self.start].copy_(part)

    def common(self, begin: int, count: int) -> tuple[int, int]:
        """Return start and end of the overlap with `count` elements from `begin` on."""
        return max(self.start, begin), min(self.start + self.values.numel(), begin + count)

    def needs(self, piece: Slice, entry: TensorEntry) -> bool:
        """Return whether a slice contains any of these elements."""
        low, high = self.common(begin_of(piece, entry), math.prod(piece.shape))
        return low < high


Regions = Mapping[str, Region]


def whole(tensor: torch.Tensor) -> Region:
    """Return a region of all elements of a contiguous tensor."""
    return Region(tensor.detach().view(-1), 0, tensor.numel())


def begin_of(piece: Slice, entry: TensorEntry) -> int:
    """Return the index of a slice's first element in its tensor. A slice consists of full rows."""
    row = math.prod(entry.shape[1:])
    return piece.offsets[0] * row if piece.offsets else 0
