"""Where people find in MLflow what a run has there, for the artifacts of a pipeline."""

from __future__ import annotations

from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.tracking.connect import (
    brisk,
    open_tracking,
    resolve_uri,
    shown,
    tracking_errors,
)
from steadytrain.components.shared.tracking.notes import RUN, recall
from steadytrain.components.shared.workspace import Workspace


def run_links(config: RunConfig, workspace: Workspace) -> dict[str, str]:
    """`mlflow_run_id`, and `mlflow_run`, its page, where the store is a server.

    Raises:
        TrackingError: the store cannot be used.
    """
    run_id = recall(workspace, RUN)
    server = _server(config, workspace)
    if not server:
        return {"mlflow_run_id": run_id}
    with brisk():
        tracking = open_tracking(config, workspace)
        with tracking_errors(tracking.uri):
            experiment = tracking.client.get_run(run_id).info.experiment_id
    page = f"{server}/#/experiments/{experiment}/runs/{run_id}"
    return {"mlflow_run_id": run_id, "mlflow_run": page}


def version_link(
    config: RunConfig, workspace: Workspace, name: str, version: str
) -> dict[str, str]:
    """`mlflow_version`, the page of a model's version, where the store is a server."""
    server = _server(config, workspace)
    return {"mlflow_version": f"{server}/#/models/{name}/versions/{version}"} if server else {}


def _server(config: RunConfig, workspace: Workspace) -> str:
    """Its address without credentials; "" for a file."""
    uri = shown(resolve_uri(config, workspace))
    return uri.rstrip("/") if uri.startswith(("http://", "https://")) else ""
