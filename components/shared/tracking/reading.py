"""Read from a store without creating it, and link to a run's pages."""

from __future__ import annotations

from typing import Any

from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.shared.retry import waiting
from steadytrain.components.shared.tracking.connect import (
    check_installed,
    import_mlflow,
    open_tracking,
    preserved_environment,
    registry_uri,
    resolve_uri,
    short_timeouts,
    shown,
    tracking_errors,
)
from steadytrain.components.shared.tracking.notes import RUN, recall
from steadytrain.components.shared.tracking.store import exists, follow
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


def reading_client(uri: str) -> Any:
    """Return MLflow's client for the registered models of a tracking store.

    Raises:
        BadInput: there is no store.
        TrackingError: the store cannot be used.
    """
    registry = registry_uri(uri)
    check_installed(registry)
    mlflow = import_mlflow()
    with tracking_errors(registry):
        if not exists(registry):
            raise BadInput(
                f"there is no MLflow store at {shown(registry)}: no run has been tracked there",
                remedy="name the output folder of the run that registered the model, or set "
                "MLFLOW_TRACKING_URI to the store's address",
            )
        # The models may be on a server, and no run tracked here yet.
        return mlflow.MlflowClient(uri if exists(uri) else registry, registry)


def read_registry(config: RunConfig, workspace: Workspace) -> Any:
    """Point MLflow's own functions in this process at the run's registered models.

    Returns:
        MLflow's client.

    Raises:
        BadInput, TrackingError: as for `reading_client`.
    """
    uri = resolve_uri(config, workspace)
    client = reading_client(uri)
    with tracking_errors(uri):
        follow(uri, workspace)
    mlflow = import_mlflow()
    with preserved_environment(), tracking_errors(uri):
        # An unusable store must not look like a model that does not exist.
        client.search_registered_models(max_results=1)
        mlflow.set_tracking_uri(client.tracking_uri)
        mlflow.set_registry_uri(registry_uri(uri))
    return client
