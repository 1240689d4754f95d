"""Read the files that Weights & Biases writes offline: a log of records, in LevelDB's format."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

_HEADER, _BLOCK, _PREFIX = 7, 32_768, 7
_ENDS: Final = (1, 4)
"""Kinds of the pieces that complete a record: all of it, and its last one."""


def rows(path: Path) -> list[dict[str, Any]]:
    """Return what was logged, one mapping for each call, in the order of the file."""
    from wandb.proto import wandb_internal_pb2

    found = []
    for data in _records(path.read_bytes()):
        record = wandb_internal_pb2.Record.FromString(data)
        if record.WhichOneof("record_type") == "history":
            row: dict[str, Any] = {}
            for item in record.history.item:
                *outer, name = item.nested_key
                place = row
                for key in outer:
                    place = place.setdefault(key, {})
                place[name] = json.loads(item.value_json)
            found.append(row)
    return found


def _records(content: bytes) -> Iterator[bytes]:
    place, held = _HEADER, b""
    while place + _PREFIX <= len(content):
        left = _BLOCK - place % _BLOCK
        if left < _PREFIX:
            place += left
            continue
        _, length, kind = struct.unpack("<IHB", content[place : place + _PREFIX])
        place += _PREFIX
        held += content[place : place + length]
        place += length
        if kind in _ENDS:
            yield held
            held = b""
