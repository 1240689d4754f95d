"""Checkpoints: everything exact resume needs, saved completely or not at all, and verified."""

from steadytrain.components.train.checkpoint.checkpoint import (
    Checkpoint,
    CheckpointDamaged,
    Lineage,
)
from steadytrain.components.train.checkpoint.store import (
    CheckpointStore,
    checkpoints_of,
    newest,
    open_store,
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
