"""Checkpoints: everything exact resume needs, saved completely or not at all, and verified."""

from steadytrain.components.train.checkpoint.checkpoint import Checkpoint, CheckpointDamaged
from steadytrain.components.train.checkpoint.lineage import Lineage
from steadytrain.components.train.checkpoint.place import checkpoints_of, open_store
from steadytrain.components.train.checkpoint.store import (
    CheckpointStore,
    newest,
    refuse_foreign,
    survey,
)

__all__ = [
    "Checkpoint",
    "CheckpointDamaged",
    "CheckpointStore",
    "Lineage",
    "checkpoints_of",
    "newest",
    "open_store",
    "refuse_foreign",
    "survey",
]
