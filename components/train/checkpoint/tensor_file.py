"""Write safetensors files directly from a snapshot's memory, and read them piece by piece.

The library's own writer makes another copy of everything, and needs a second pass for the digest.
Format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import hashlib
import io
import json
import math
from collections.abc import Iterable, Iterator
from typing import Final

import torch
from pydantic import BaseModel, NonNegativeInt, TypeAdapter

from steadytrain.components.shared.storage.base import CHUNK_BYTES, Buffer, Stream
from steadytrain.components.train.checkpoint.manifest import FileEntry, Slice, TensorEntry
from steadytrain.components.train.checkpoint.snapshot import Snapshot

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
