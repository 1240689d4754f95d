"""The MLflow run and the experiment that the environment names."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from typing import Any, Final

from steadytrain.components.shared.cluster import POD_VARIABLE
from steadytrain.components.shared.config.evaluation import TrackingConfig
from steadytrain.components.shared.errors import BadInput

PARENT: Final = "mlflow.parentRunId"
"""MLflow's tag of a nested run: the id of the run above it."""
OWNER: Final = "steadytrain.owner"
"""Tag of a given run: the identity of the run that reports into it."""


def run_id_from_environment() -> str:
    """Return MLFLOW_RUN_ID; "" if it is not set."""
    return os.environ.get("MLFLOW_RUN_ID", "")


def run_from_environment(client: Any, store: str) -> Any | None:
    """Return the run to report into; None if MLFLOW_RUN_ID is not set.

    In a step of Kubeflow Pipelines, MLFLOW_RUN_ID may be the step's own run, which its MLflow
    plugin nests in that of the pipeline. One training has many steps, so it is the pipeline's.

    Args:
        client: MLflow's client.
        store: address of the store, for messages.

    Raises:
        BadInput: the store has no such run, or it was deleted.
        MlflowException: the store cannot be used.
    """
    if not run_id_from_environment():
        return None
    run = _run(
        client, run_id_from_environment(), f"MLFLOW_RUN_ID = {run_id_from_environment()!r}", store
    )
    above = run.data.tags.get(PARENT, "")
    if not above or not os.environ.get(POD_VARIABLE):
        return run
    return _run(client, above, f"{above!r}, in which MLFLOW_RUN_ID is nested", store)


def stated_experiment(client: Any, configured: str, store: str) -> str:
    """Return the experiment's name: configured, of the environment as MLflow reads it, or default.

    Raises:
        BadInput: the store has no experiment with the id in MLFLOW_EXPERIMENT_ID.
        MlflowException: the store cannot be used.
    """
    default = TrackingConfig.model_fields["experiment"].default
    name = os.environ.get("MLFLOW_EXPERIMENT_NAME")
    number = os.environ.get("MLFLOW_EXPERIMENT_ID")
    if configured != default or name or not number:
        return configured if configured != default else name or default
    with _missing_as_bad_input(f"MLFLOW_EXPERIMENT_ID = {number!r}", "experiment", store):
        return str(client.get_experiment(number).name)


def is_of_another(run: Any, owner: str, params: Mapping[str, str]) -> bool:
    """Return whether a given run describes something else. MLflow never changes a parameter.

    Args:
        run: the given run.
        owner: the identity of the run that wants to report into it.
        params: the parameters of that run.
    """
    owned = run.data.tags.get(OWNER, "")
    if owned:
        return bool(owned != owner)
    known = run.data.params
    return any(known.get(name, text) != text for name, text in params.items())


def _run(client: Any, run_id: str, what: str, store: str) -> Any:
    with _missing_as_bad_input(what, "run", store):
        run = client.get_run(run_id)
    if run.info.lifecycle_stage == "deleted":
        raise BadInput(
            f"{what}: this run of {store} was deleted",
            remedy=f"restore it (mlflow runs restore --run-id {run_id}), or unset it",
        )
    return run


@contextlib.contextmanager
def _missing_as_bad_input(what: str, kind: str, store: str) -> Iterator[None]:
    """Turn MLflow's error about something that does not exist, or cannot, into BadInput."""
    from mlflow.exceptions import MlflowException

    try:
        yield
    except MlflowException as error:
        if error.error_code not in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
            raise
        raise BadInput(
            f"{what}: {store} has no such {kind}",
            remedy=f"unset it, or point tracking.uri or MLFLOW_TRACKING_URI at the {kind}'s store",
        ) from error
