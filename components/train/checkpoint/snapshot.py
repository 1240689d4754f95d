"""This rank's slices of the training state: copy them to host memory, write them, and read them.

The training thread waits only for the copy. The memory is page-locked if there is a GPU, and the
next snapshot reuses it. If the host has no memory to spare, there is no copy: training waits until
everything is written.

The files are in the safetensors format (https://github.com/huggingface/safetensors#format). The
library's own writer makes another copy of everything, and needs a second pass for the digest.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from pydantic import BaseModel, NonNegativeInt, TypeAdapter

from steadytrain.components.shared.storage.base import CHUNK_BYTES, Buffer, Stream
from steadytrain.components.train.checkpoint.manifest import FileEntry, Slice, TensorEntry
from steadytrain.components.train.failures import NonFiniteState


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
        values = (_flat(piece.values) for piece in self.pieces)
        for flat in values if self.memory is None else [self.memory]:
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
            pieces += [full_piece(name, tensor)] if rank == 0 else []
        elif first < last:
            values = tensor.detach() if tensor.dim() == 0 else rows[first:last]
            offsets = [first, *[0] * (tensor.dim() - 1)][: tensor.dim()]
            pieces.append(Piece(name, values, offsets, list(tensor.shape)))
    if rank == 0:
        pieces += [full_piece(name, tensors[name]) for name in tensors if name in on_first]
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
            target = memory[start : start + piece.bytes].view(piece.values.dtype)
            target = target.view(piece.values.shape)
            target.copy_(piece.values, non_blocking=True)
            copied.append(Piece(piece.name, target, piece.offsets, piece.shape))
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


def full_piece(name: str, tensor: torch.Tensor) -> Piece:
    """Return a piece with all of a tensor."""
    return Piece(name, tensor.detach(), [0] * tensor.dim(), list(tensor.shape))


def _finite(values: torch.Tensor) -> bool:
    if not values.numel():
        return True
    # PyTorch has no aminmax for 8-bit types.
    wide = values.float() if values.element_size() == 1 else values
    return all(math.isfinite(float(end)) for end in torch.aminmax(wide))


_NAMES: Final = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}
_DTYPES: Final[dict[str, torch.dtype]] = {
    short: getattr(torch, name) for name, short in _NAMES.items()
}
_LENGTH_BYTES = 8
_LONGEST_HEADER = 100_000_000
"""Limit in bytes of the format's own library. Without one, a damaged length could fill memory."""


class _HeaderEntry(BaseModel):
    dtype: str
    shape: list[NonNegativeInt]
    data_offsets: tuple[int, int]


_HEADER = TypeAdapter(dict[str, _HeaderEntry])


class Digested:
    """Passes buffers through, and computes their size and digest on the way."""

    def __init__(self, parts: Iterable[Buffer]) -> None:
        self.parts, self.sha, self.bytes = parts, hashlib.sha256(), 0

    def __iter__(self) -> Iterator[Buffer]:
        for part in self.parts:
            self.sha.update(part)
            self.bytes += len(part)
            yield part

    def entry(self, name: str) -> FileEntry:
        """Return the entry of the file `name` that the buffers were written to."""
        return FileEntry(name=name, bytes=self.bytes, digest=self.sha.hexdigest())


def encode(snapshot: Snapshot) -> Iterator[Buffer]:
    """Yield the file's content, a few megabytes at a time."""
    header, start = {}, 0
    for piece in snapshot.pieces:
        header[_full_name(snapshot, piece.name)] = {
            "dtype": _NAMES[dtype_name(piece.values)],
            "shape": list(piece.values.shape),
            "data_offsets": [start, start + piece.bytes],
        }
        start += piece.bytes
    text = json.dumps(header).encode()
    # Padding aligns the tensors.
    text += b" " * (-len(text) % _LENGTH_BYTES)
    yield len(text).to_bytes(_LENGTH_BYTES, "little") + text
    yield from snapshot.content()


def entries(snapshot: Snapshot, file: str) -> list[TensorEntry]:
    """Return where the snapshot's pieces are, once they are in `file`."""
    return [
        TensorEntry(
            name=_full_name(snapshot, piece.name),
            dtype=dtype_name(piece.values),
            shape=piece.shape,
            slices=[Slice(file=file, offsets=piece.offsets, shape=list(piece.values.shape))],
        )
        for piece in snapshot.pieces
    ]


def read(parts: Iterable[Buffer]) -> Iterator[tuple[str, int, torch.Tensor]]:
    """Yield a file's values while it is read, a few megabytes at a time.

    Yields:
        The tensor's name, the index of the first value within it, and the values, of one dimension.
        They share memory with those that follow: copy them first.

    Raises:
        ValueError: the content is not that of such a file.
    """
    file = io.BufferedReader(Stream(parts), CHUNK_BYTES)
    length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
    if length > _LONGEST_HEADER:
        raise ValueError(f"a header of {length} bytes")
    header = _HEADER.validate_json(file.read(length))
    buffer, position = bytearray(CHUNK_BYTES), 0
    for name, item in sorted(header.items(), key=lambda entry: entry[1].data_offsets):
        dtype, count = _DTYPES.get(item.dtype), math.prod(item.shape)
        if dtype is None:
            raise ValueError(f"{name} is of an unknown type")
        if item.data_offsets != (position, position + count * dtype.itemsize):
            raise ValueError(f"{name} is not where it belongs")
        for at in range(0, count, len(buffer) // dtype.itemsize):
            values = min(count - at, len(buffer) // dtype.itemsize)
            size = values * dtype.itemsize
            if file.readinto(memoryview(buffer)[:size]) != size:
                raise ValueError(f"{name} is cut off")
            yield name, at, torch.frombuffer(buffer, dtype=dtype, count=values)
        position = item.data_offsets[1]
    if file.read(1):
        raise ValueError("more than its tensors")


def is_storable(tensor: torch.Tensor) -> bool:
    """Return whether files have the tensor's dtype."""
    return dtype_name(tensor) in _NAMES


def dtype_name(tensor: torch.Tensor) -> str:
    """Return PyTorch's name of the dtype, such as "float32"."""
    return str(tensor.dtype).removeprefix("torch.")


def _full_name(snapshot: Snapshot, name: str) -> str:
    return f"{snapshot.part}/{name}"
