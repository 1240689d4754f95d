"""Small real checkpoints."""

from __future__ import annotations

import torch

from steadytrain.components.shared.workspace import Workspace
from steadytrain.components.train.checkpoint import CheckpointStore


def save_checkpoint(workspace: Workspace, step: int) -> None:
    """A committed checkpoint of one tensor."""
    CheckpointStore(workspace.checkpoints, keep=99).save(
        step,
        parts={"model": {"weight": torch.full((64,), float(step))}},
        state={"progress": {"step": step}},
        world_size=1,
    )
