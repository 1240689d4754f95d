"""The work before the first step. Everything that can be rejected early is rejected here."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from functools import partial
from types import MappingProxyType

from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.shared.lm_tasks import check_lm_tasks
from steadytrain.components.shared.quantities import size
from steadytrain.components.shared.retry import retry
from steadytrain.components.shared.stage import report_wait, stage
from steadytrain.components.shared.storage import LocalStorage
from steadytrain.components.shared.tracking import check_tracking, parent_run
from steadytrain.components.shared.workspace import Workspace

MIN_FREE_BYTES = 200 * 2**20
"""With less space, not even the checkpoints of a small run fit."""


def start_run(config: RunConfig, tags: Mapping[str, str] = MappingProxyType({})) -> Workspace:
    """Create the run's folder, store its configuration, and open its MLflow run.

    Safe to repeat: an existing run is continued.

    Args:
        config: the run's configuration.
        tags: additional tags for the MLflow run.

    Raises:
        BadInput: if the output cannot be written or has too little space, or an evaluation task
            cannot run.
        TrackingError: if the tracking server cannot be used. If it is only down, this waits for it
            first (`recovery.server_wait_seconds`).
    """
    with stage(config, "begin") as current:
        workspace = current.workspace
        _check_room(workspace)
        check_lm_tasks(config)
        seconds = config.recovery.server_wait_seconds
        retry(
            lambda: check_tracking(config, workspace),
            seconds=seconds,
            report=partial(report_wait, current, seconds),
        )
        LocalStorage(workspace.folder).write(workspace.config.name, config.to_saved())
        parent_run(config, workspace, tags)
        current.summary = f"run {config.run_id} in {workspace.output}"
        return workspace


def _check_room(workspace: Workspace) -> None:
    free = shutil.disk_usage(workspace.folder).free
    if free < MIN_FREE_BYTES:
        raise BadInput(
            f"output = {str(workspace.output)!r} has {size(free)} free, "
            f"less than {size(MIN_FREE_BYTES)}",
            remedy="free space there, or set another output",
        )
