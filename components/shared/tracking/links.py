"""Links to a run's pages in MLflow, for the artifacts of a pipeline."""

from __future__ import annotations

from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.retry import waiting
from steadytrain.components.shared.tracking.connect import (
    open_tracking,
    resolve_uri,
    short_timeouts,
    shown,
    tracking_errors,
)
from steadytrain.components.shared.tracking.notes import RUN, recall
from steadytrain.components.shared.workspace import Workspace


def run_links(config: RunConfig, workspace: Workspace) -> dict[str, str]:
    """Return `mlflow_run_id` and, if the store is a server, the run's page as `mlflow_run`.

    Raises:
        TrackingError: if the store cannot be used.
    """
    run_id = recall(workspace, RUN)
    server = _server(config, workspace)
    if not server:
        return {"mlflow_run_id": run_id}
    with short_timeouts(), waiting(config.recovery.server_wait_seconds):
        tracking = open_tracking(config, workspace)
        with tracking_errors(tracking.uri):
            experiment = tracking.client.get_run(run_id).info.experiment_id
    page = f"{server}/#/experiments/{experiment}/runs/{run_id}"
    return {"mlflow_run_id": run_id, "mlflow_run": page}


def version_link(
    config: RunConfig, workspace: Workspace, name: str, version: str
) -> dict[str, str]:
    """Return the page of a model version as `mlflow_version`, if the store is a server."""
    server = _server(config, workspace)
    return {"mlflow_version": f"{server}/#/models/{name}/versions/{version}"} if server else {}


def _server(config: RunConfig, workspace: Workspace) -> str:
    """Return the server's address without credentials; "" for a file."""
    uri = shown(resolve_uri(config, workspace))
    return uri.rstrip("/") if uri.startswith(("http://", "https://")) else ""
