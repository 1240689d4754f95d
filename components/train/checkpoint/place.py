"""Locate a run's checkpoints from its configuration."""

from __future__ import annotations

from collections.abc import Callable

from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.workspace import Workspace
from steadytrain.components.train.checkpoint.cadence import Retention
from steadytrain.components.train.checkpoint.lineage import Lineage
from steadytrain.components.train.checkpoint.store import CheckpointStore


def checkpoints_of(config: RunConfig) -> str:
    """Return the address of a run's checkpoints: a folder, or s3://bucket/prefix."""
    place = config.recovery.checkpoints
    if place is None:
        return str(Workspace.of(config).checkpoints)
    return f"{place.rstrip('/')}/{config.run_id}"


def open_store(
    config: RunConfig,
    fence: Callable[[], None] = lambda: None,
    lineage: Lineage = Lineage(),  # noqa: B008  immutable
) -> CheckpointStore:
    """Open the store of a run's checkpoints.

    Args:
        fence, lineage: as for `CheckpointStore`.
    """
    training = config.training
    retention = Retention(training.save_total_limit, training.save_keep_every)
    return CheckpointStore(
        checkpoints_of(config), keep=retention, fence=fence, lineage=lineage, run=config.run_id
    )
