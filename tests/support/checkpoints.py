"""Complete checkpoints without training: write every rank's part, one after another."""

from __future__ import annotations

import json
import threading
import uuid
from collections.abc import Mapping
from pathlib import Path

import torch

from steadytrain.components.train.checkpoint import Checkpoint, CheckpointStore
from steadytrain.components.train.checkpoint.manifest import Manifest
from steadytrain.components.train.checkpoint.snapshot import HostMemory, cut
from steadytrain.components.train.checkpoint.store import committed

PARTS = {
    "model": {"weight": torch.arange(12.0).reshape(3, 4), "count": torch.tensor(3)},
    "optimizer": {"weight/exp_avg": torch.ones(3, 4, dtype=torch.bfloat16)},
}


def save(
    store: CheckpointStore,
    step: int,
    *,
    parts: Mapping[str, Mapping[str, torch.Tensor]] = PARTS,
    world_size: int = 1,
) -> Manifest:
    """Save a step; the shared state contains the step, each rank's own state the rank."""
    name = uuid.uuid4().hex[:12]
    for rank in range(world_size):
        memory = HostMemory()
        snapshots = [
            memory.take(part, cut(tensors, rank, world_size)) for part, tensors in parts.items()
        ]
        store.write_rank(step, name, rank, snapshots, {"rank": rank})
    state = json.dumps({"step": step}).encode()
    return store.commit(step, name, world_size, state, given_up=threading.Event())


def stored(address: str | Path, parts: Mapping[str, Mapping[str, torch.Tensor]]) -> Checkpoint:
    """Save a checkpoint with these parts, and return it."""
    store = CheckpointStore(address, keep=1)
    save(store, 1, parts=parts)
    return store.path(1)


def names(address: str | Path) -> list[str]:
    """Return the names of the committed checkpoints, the oldest first."""
    return [checkpoint.name for checkpoint in committed(address)]


def save_checkpoint(address: str, step: int) -> None:
    """Save a committed checkpoint with one tensor."""
    store = CheckpointStore(address, keep=99)
    save(store, step, parts={"model": {"weight": torch.full((64,), float(step))}})


def shifted(by: float) -> dict[str, dict[str, torch.Tensor]]:
    """Return PARTS with other values."""
    return {
        part: {name: item + by for name, item in tensors.items()} for part, tensors in PARTS.items()
    }


def same(loaded: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> bool:
    """Return whether names, types and values are equal."""
    return loaded.keys() == expected.keys() and all(
        loaded[name].dtype == value.dtype and torch.equal(loaded[name], value)
        for name, value in expected.items()
    )


def flip(path: Path) -> None:
    """Flip one bit in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
