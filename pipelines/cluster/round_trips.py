"""Round trips to the services that a run uses: S3, MLflow, Kubeflow Pipelines."""

from __future__ import annotations

import hashlib
import os
import secrets
from typing import Any

from steadytrain.components.shared.errors import BadInput, TrackingError
from steadytrain.components.shared.kubeflow.client import HOST_VARIABLE
from steadytrain.components.shared.kubeflow.connection import connect
from steadytrain.components.shared.storage import open_storage
from steadytrain.components.shared.tracking.connect import (
    import_mlflow,
    short_timeouts,
    shown,
    tracking_errors,
)
from steadytrain.pipelines.cluster.access import Line, failed, passed, unasked

_PROBE_BYTES = 1 << 20


def try_storage(address: str) -> Line:
    """Write an object, read it back, compare the two, and delete it.

    Raises:
        SteadytrainError: the storage cannot be used.
    """
    topic = "S3"
    if not address:
        return unasked(topic, "no address is given", "name one: --storage s3://bucket/prefix")
    storage, name = open_storage(address), f"steadytrain-doctor-{secrets.token_hex(4)}"
    content = secrets.token_bytes(_PROBE_BYTES)
    storage.write(name, content)
    try:
        back = storage.read(name)
    finally:
        storage.delete(name)
    if hashlib.sha256(back).digest() != hashlib.sha256(content).digest():
        return failed(
            topic,
            f"{address} returned different bytes than were written",
            "a proxy or cache between this machine and the bucket changes objects",
        )
    if storage.exists(name):
        return failed(
            topic,
            f"{address}: an object is still there after it was deleted",
            "give the credentials permission to delete (s3:DeleteObject)",
        )
    return passed(topic, f"{address}: wrote an object, read it back, compared and deleted it")


def try_tracking() -> Line:
    """Create an experiment and a run, log to the run, read it back, and delete both.

    Raises:
        TrackingError: the server cannot be used.
    """
    topic, uri = "MLflow", os.environ.get("MLFLOW_TRACKING_URI", "")
    if not uri:
        return unasked(topic, "MLFLOW_TRACKING_URI is not set", "set it to the server's address")
    with short_timeouts(), tracking_errors(uri):
        client = import_mlflow().MlflowClient(uri)
        experiment = client.create_experiment(f"steadytrain-doctor-{secrets.token_hex(4)}")
        try:
            value = _log(client, experiment)
        finally:
            client.delete_experiment(experiment)
    if value != 1.0:
        raise TrackingError(f"{shown(uri)} returned {value} for a metric of 1.0")
    return passed(topic, f"{shown(uri)}: created a run, logged to it, read it and deleted it")


def _log(client: Any, experiment: str) -> float | None:
    run = client.create_run(experiment).info.run_id
    try:
        client.log_param(run, "asked_by", "doctor")
        client.log_metric(run, "probe", 1.0)
        value = client.get_run(run).data.metrics.get("probe")
        return None if value is None else float(value)
    finally:
        client.delete_run(run)


def try_pipelines(host: str) -> Line:
    """Ask Kubeflow Pipelines for its health and version.

    Raises:
        SteadytrainError: it cannot be reached, or it is too old.
    """
    topic = "Kubeflow Pipelines"
    if not (host or os.environ.get(HOST_VARIABLE) or "KUBERNETES_SERVICE_HOST" in os.environ):
        return unasked(topic, "no address is given", f"give --host or set {HOST_VARIABLE}")
    try:
        server = connect(host)
    except BadInput as error:
        return failed(topic, error.message, error.remedy)
    health = server.client.health()
    return passed(topic, f"{server.host}, version {health.get('tag_name') or 'unknown'}")
