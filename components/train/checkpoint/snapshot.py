"""This rank's slices of the training state, copied to host memory at one moment.

The training thread waits only for the copy. The memory is page-locked if there is a GPU, and the
next snapshot reuses it. If the host has no memory to spare, there is no copy: training waits until
everything is written.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from steadytrain.components.shared.storage.base import CHUNK_BYTES, Buffer
from steadytrain.components.train.errors import NonFiniteState

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Piece:
    """Some rows of a tensor: `values` start at `offsets` in the full tensor of shape `shape`."""

    name: str
    values: torch.Tensor
    offsets: list[int]
    shape: list[int]

    @property
    def bytes(self) -> int:
        return self.values.numel() * self.values.element_size()


@dataclass(frozen=True)
class Snapshot:
    """Pieces of one part ("model", "optimizer"), in the order in which they are written.

    memory: the bytes of all values, stored contiguously. None if they were not copied.
    """

    part: str
    pieces: Sequence[Piece]
    memory: torch.Tensor | None = None

    @property
    def bytes(self) -> int:
        return sum(piece.bytes for piece in self.pieces)

    def content(self) -> Iterator[Buffer]:
        """Yield the bytes of all pieces, a few megabytes at a time."""
        own = (_flat(piece.values) for piece in self.pieces)
        for flat in own if self.memory is None else [self.memory]:
            for start in range(0, len(flat), CHUNK_BYTES):
                yield flat[start : start + CHUNK_BYTES].cpu().numpy().data

    def check(self, step: int) -> None:
        """Reject a state that training cannot continue from.

        Raises:
            NonFiniteState: a value is NaN or infinite. The error names the tensor.
        """
        for piece in self.pieces:
            if piece.values.is_floating_point() and not _finite(piece.values):
                raise NonFiniteState(step, f"{self.part}/{piece.name}")


def cut(
    tensors: Tensors, rank: int, world_size: int, *, on_first: Collection[str] = ()
) -> list[Piece]:
    """Return a rank's share of tensors that are identical on all ranks.

    The rows of all tensors, one after another, are divided into equal numbers of bytes, at row
    boundaries. Each rank gets one contiguous range, and ranges do not overlap.

    Args:
        on_first: names of tensors that differ between ranks; rank 0's are saved.
    """
    alike = {name: tensor for name, tensor in tensors.items() if name not in on_first}
    total = sum(tensor.numel() * tensor.element_size() for tensor in alike.values())
    low, high = (total * part // world_size for part in (rank, rank + 1))
    pieces, start = [], 0
    for name, tensor in alike.items():
        rows = tensor.detach().reshape(-1) if tensor.dim() == 0 else tensor.detach()
        size = rows.numel() * rows.element_size()
        row = max(1, size // max(1, len(rows)))
        first, last = (min(len(rows), max(0, -((start - end) // row))) for end in (low, high))
        start += size
        if tensor.numel() == 0:
            pieces += [whole_piece(name, tensor)] if rank == 0 else []
        elif first < last:
            values = tensor.detach() if tensor.dim() == 0 else rows[first:last]
            offsets = [first, *[0] * (tensor.dim() - 1)][: tensor.dim()]
            pieces.append(Piece(name, values, offsets, list(tensor.shape)))
    if rank == 0:
        pieces += [whole_piece(name, tensors[name]) for name in tensors if name in on_first]
    return pieces


class HostMemory:
    """Host memory for snapshots, by part, reused from save to save."""

    def __init__(self) -> None:
        self._kept: dict[str, torch.Tensor] = {}

    def take(self, part: str, pieces: Sequence[Piece]) -> Snapshot:
        """Copy the pieces. This overwrites the previous snapshot of the part."""
        ordered = _aligned(pieces)
        memory = self._memory(part, sum(piece.bytes for piece in ordered))
        copied, start = [], 0
        for piece in ordered:
            place = memory[start : start + piece.bytes].view(piece.values.dtype)
            place = place.view(piece.values.shape)
            place.copy_(piece.values, non_blocking=True)
            copied.append(Piece(piece.name, place, piece.offsets, piece.shape))
            start += piece.bytes
        if memory.is_pinned():
            torch.cuda.current_stream().synchronize()
        return Snapshot(part, copied, memory)

    def _memory(self, part: str, size: int) -> torch.Tensor:
        kept = self._kept.get(part)
        if kept is None or len(kept) != size:
            pinned = size > 0 and torch.cuda.is_available()
            kept = self._kept[part] = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
        return kept


def in_place(part: str, pieces: Sequence[Piece]) -> Snapshot:
    """Return a snapshot without a copy. The tensors must not change until they are written."""
    return Snapshot(part, _aligned(pieces))


def _aligned(pieces: Sequence[Piece]) -> list[Piece]:
    """Sort wide types first, so every tensor is aligned without gaps."""
    return sorted(pieces, key=lambda piece: (-piece.values.element_size(), piece.name))


def _flat(values: torch.Tensor) -> torch.Tensor:
    return values.reshape(-1).view(torch.uint8)


def whole_piece(name: str, tensor: torch.Tensor) -> Piece:
    """Return a piece with all of a tensor."""
    return Piece(name, tensor.detach(), [0] * tensor.dim(), list(tensor.shape))


def _finite(values: torch.Tensor) -> bool:
    if not values.numel():
        return True
    # PyTorch has no aminmax for 8-bit types.
    wide = values.float() if values.element_size() == 1 else values
    return all(math.isfinite(float(end)) for end in torch.aminmax(wide))
