"""Read from a store that may not exist, without creating it as MLflow would."""

from __future__ import annotations

from typing import Any

from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.shared.tracking.connect import (
    check_installed,
    environment_kept,
    import_mlflow,
    registry_uri,
    resolve_uri,
    shown,
    tracking_errors,
)
from steadytrain.components.shared.tracking.store import exists, follow
from steadytrain.components.shared.workspace import Workspace


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
    with environment_kept(), tracking_errors(uri):
        # An unusable store must not look like a model that does not exist.
        client.search_registered_models(max_results=1)
        mlflow.set_tracking_uri(client.tracking_uri)
        mlflow.set_registry_uri(registry_uri(uri))
    return client
