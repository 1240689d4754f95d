"""Write safetensors files directly from a snapshot's memory, and read them from bytes.

The library's own writer makes another copy of everything, and needs a second pass for the digest.
Format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator

import torch

from steadytrain.components.shared.storage.base import Buffer
from steadytrain.components.train.checkpoint.manifest import FileEntry, Slice, TensorEntry
from steadytrain.components.train.checkpoint.snapshot import Snapshot

_NAMES = {
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
_LENGTH_BYTES = 8


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


def decode(content: bytearray) -> dict[str, torch.Tensor]:
    """Return the tensors of a file. They share memory with `content`."""
    length = int.from_bytes(content[:_LENGTH_BYTES], "little")
    data = _LENGTH_BYTES + length
    dtypes = {short: getattr(torch, name) for name, short in _NAMES.items()}
    found = {}
    for name, item in json.loads(content[_LENGTH_BYTES:data]).items():
        dtype, shape = dtypes[item["dtype"]], item["shape"]
        count = math.prod(shape)
        flat = (
            torch.frombuffer(
                content, dtype=dtype, count=count, offset=data + item["data_offsets"][0]
            )
            if count
            else torch.empty(0, dtype=dtype)
        )
        found[name] = flat.view(shape)
    return found


def is_storable(tensor: torch.Tensor) -> bool:
    """Return whether files have the tensor's dtype."""
    return dtype_name(tensor) in _NAMES


def dtype_name(tensor: torch.Tensor) -> str:
    """Return PyTorch's name of the dtype, such as "float32"."""
    return str(tensor.dtype).removeprefix("torch.")


def _full_name(snapshot: Snapshot, name: str) -> str:
    return f"{snapshot.part}/{name}"
