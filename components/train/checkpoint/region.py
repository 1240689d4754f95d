"""A stretch of a tensor that a rank holds, and what a checkpoint has of it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from steadytrain.components.train.checkpoint.manifest import Slice, TensorEntry


@dataclass(frozen=True)
class Region:
    """Elements of a tensor, counted one row behind another, and where they are in memory.

    values: one-dimensional; what is written to it is written to the model.
    start: of the first of them in the whole tensor. size: elements of the whole tensor.
    """

    values: torch.Tensor
    start: int
    size: int

    @torch.no_grad()
    def fill(self, held: torch.Tensor, begin: int) -> None:
        """Takes what it has in common with other elements of the tensor, which begin there."""
        low, high = self.common(begin, held.numel())
        if low < high:
            part = held.reshape(-1)[low - begin : high - begin]
            self.values[low - self.start : high - self.start].copy_(part)

    def common(self, begin: int, count: int) -> tuple[int, int]:
        """Where what it has in common with so many elements begins and ends."""
        return max(self.start, begin), min(self.start + self.values.numel(), begin + count)

    def needs(self, piece: Slice, entry: TensorEntry) -> bool:
        """Whether a slice holds any of its elements."""
        low, high = self.common(begin_of(piece, entry), math.prod(piece.shape))
        return low < high


Regions = Mapping[str, Region]


def whole(tensor: torch.Tensor) -> Region:
    """All of a contiguous tensor."""
    return Region(tensor.detach().view(-1), 0, tensor.numel())


def begin_of(piece: Slice, entry: TensorEntry) -> int:
    """Where a slice, which is of whole rows, begins in its tensor."""
    row = math.prod(entry.shape[1:])
    return piece.offsets[0] * row if piece.offsets else 0
