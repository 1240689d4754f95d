"""Checkpoints: all that exact resume needs, whole or not at all, verified before use."""

from steadytrain.components.train.checkpoint.checkpoint import Checkpoint, CheckpointDamaged
from steadytrain.components.train.checkpoint.lineage import Lineage
from steadytrain.components.train.checkpoint.place import checkpoints_of, open_store
from steadytrain.components.train.checkpoint.store import CheckpointStore, newest, survey

__all__ = [
    "Checkpoint",
    "CheckpointDamaged",
    "CheckpointStore",
    "Lineage",
    "checkpoints_of",
    "newest",
    "open_store",
    "survey",
]
