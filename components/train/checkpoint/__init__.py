"""Checkpoints: all that exact resume needs, whole or not at all, verified before use."""

from steadytrain.components.train.checkpoint.store import CheckpointStore, newest

__all__ = ["CheckpointStore", "newest"]
