"""The MLflow run of a pipeline run, and what it is described with."""

from __future__ import annotations

import os
from typing import Any

from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.digest import code_digest
from steadytrain.components.shared.tracking.connect import (
    Tracking,
    import_mlflow,
    open_tracking,
    tracking_errors,
)
from steadytrain.components.shared.tracking.notes import RUN, recall, remember
from steadytrain.components.shared.tracking.values import MAX_PARAMS_A_CALL, flatten, in_parts
from steadytrain.components.shared.workspace import Workspace


def parent_run(config: RunConfig, workspace: Workspace) -> str:
    """The id of the MLflow run of this pipeline run, which is open afterwards.

    It is MLFLOW_RUN_ID where that is set, else the one that the workspace
    remembers, else a new one. Safe to call from every step.

    Raises:
        BadInput: MLFLOW_RUN_ID is no run of this store.
        TrackingError: the store cannot be used.
    """
    tracking = open_tracking(config, workspace)
    run_id = continue_run(tracking, config, workspace)
    with tracking_errors(tracking.uri):
        tracking.client.update_run(run_id, status="RUNNING")
    return run_id


def continue_run(tracking: Tracking, config: RunConfig, workspace: Workspace) -> str:
    """`parent_run` in a store that is open already; a run that has ended stays so."""
    with tracking_errors(tracking.uri):
        run_id = os.environ.get("MLFLOW_RUN_ID") or _remembered(tracking, workspace)
        if not run_id:
            created = tracking.client.create_run(tracking.experiment_id, run_name=config.run_id)
            run_id = str(created.info.run_id)
        remember(workspace, RUN, run_id)
        _describe(tracking.client, run_id, config)
    return run_id


def _remembered(tracking: Tracking, workspace: Workspace) -> str:
    """The run that the workspace remembers; "" where this store does not have it."""
    mlflow = import_mlflow()
    run_id = recall(workspace, RUN)
    if not run_id:
        return ""
    try:
        run = tracking.client.get_run(run_id)
    except mlflow.MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
        return ""
    return run_id if run.info.lifecycle_stage == "active" else ""


def _describe(client: Any, run_id: str, config: RunConfig) -> None:
    """Parameters and tags. MLflow never changes a parameter, so only new ones are sent."""
    from mlflow.entities import Param, RunTag

    run = client.get_run(run_id)
    params = [
        Param(name, text)
        for name, text in flatten(config.model_dump(mode="json"))
        if name not in run.data.params
    ]
    for part in in_parts(params, MAX_PARAMS_A_CALL):
        client.log_batch(run_id, params=part)
    tags = {
        "mlflow.source.name": "steadytrain",
        "steadytrain.run": config.run_id,
        "steadytrain.task": config.data.task,
        "steadytrain.model": config.model_name,
        "steadytrain.config_digest": config.digest(),
        "steadytrain.code_digest": code_digest(),
    }
    client.log_batch(run_id, tags=[RunTag(name, text) for name, text in tags.items()])
