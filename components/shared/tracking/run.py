"""The MLflow run of a pipeline run: its description, its pages, and what a store has of it."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.digest import code_digest
from steadytrain.components.shared.environment import code_origin
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.shared.pagination import all_items
from steadytrain.components.shared.retry import waiting
from steadytrain.components.shared.tracking.batches import (
    MAX_PARAMS_A_CALL,
    flatten,
    in_batches,
    key,
)
from steadytrain.components.shared.tracking.connect import (
    OWNER,
    PARENT,
    Tracking,
    check_installed,
    import_mlflow,
    is_of_another,
    open_tracking,
    preserved_environment,
    registry_uri,
    resolve_uri,
    run_from_environment,
    run_id_from_environment,
    short_timeouts,
    shown,
    tracking_errors,
)
from steadytrain.components.shared.tracking.notes import (
    RUN,
    exclusive,
    identity,
    recall,
    remember,
    settle,
    warn,
)
from steadytrain.components.shared.tracking.store import exists, follow
from steadytrain.components.shared.workspace import Workspace

if TYPE_CHECKING:
    from mlflow.entities import Run

MARK = "steadytrain.mark"
"""Tag that finds a run in a search: the workspace's identity and the note's name."""


def parent_run(
    config: RunConfig,
    workspace: Workspace,
    tags: Mapping[str, str] = MappingProxyType({}),
) -> str:
    """Return the id of this pipeline run's MLflow run, and mark that run as running.

    If MLFLOW_RUN_ID is set, use that run, or a new one that is nested in it if it describes another
    run. Otherwise use the run in the workspace's note, or create a new one. Every step can call
    this safely.

    Args:
        config: the run's configuration.
        workspace: the run's workspace.
        tags: additional tags.

    Raises:
        BadInput: if MLFLOW_RUN_ID is not an active run of this store.
        TrackingError: if the store cannot be used.
    """
    with short_timeouts():
        tracking = open_tracking(config, workspace)
        run_id = continue_run(tracking, config, workspace)
        with tracking_errors(tracking.uri):
            tracking.client.update_run(run_id, status="RUNNING")
            for name, text in tags.items():
                tracking.client.set_tag(run_id, name, text)
    return run_id


def continue_run(tracking: Tracking, config: RunConfig, workspace: Workspace) -> str:
    """Do the same as `parent_run` in an open store, but leave a finished run finished."""
    settle(workspace)
    with tracking_errors(tracking.uri):
        given = run_from_environment(tracking.client, shown(tracking.uri))
        if given is None:
            run_id = settled_run(tracking, workspace, RUN, run_name=config.run_id)
        elif is_of_another(given, identity(workspace), _params(config)):
            run_id = _nested(tracking, config, workspace, given.info.run_id)
        else:
            run_id = given.info.run_id
            tracking.client.set_tag(run_id, OWNER, identity(workspace))
            remember(workspace, RUN, run_id)
        if given is not None and given.info.run_id != run_id_from_environment():
            _link_step(tracking.client, run_id, config)
        # MLflow's store fails if two processes write the same new parameter.
        with exclusive(workspace, "describing"):
            _describe(tracking.client, run_id, config)
    return run_id


def _nested(tracking: Tracking, config: RunConfig, workspace: Workspace, above: str) -> str:
    """Return a run of this workspace that is nested in another run's."""
    before = recall(workspace, RUN)
    run_id = settled_run(tracking, workspace, RUN, run_name=config.run_id, tags={PARENT: above})
    if run_id != before:
        warn(
            workspace,
            f"MLFLOW_RUN_ID: MLflow run {above} describes another run, and MLflow never changes "
            f"parameters; {config.run_id!r} reports into {run_id}, which is nested in it",
        )
    return run_id


def _link_step(client: Any, run_id: str, config: RunConfig) -> None:
    """Link a run and that of a pipeline's step."""
    step = run_id_from_environment()
    name = client.get_run(step).info.run_name or step
    client.set_tag(step, "steadytrain.run", config.run_id)
    client.set_tag(step, "steadytrain.mlflow_run", run_id)
    client.set_tag(run_id, key(f"steadytrain.step_run.{name}"), step)


def settled_run(
    tracking: Tracking,
    workspace: Workspace,
    note: str,
    *,
    run_name: str,
    start_time: int | None = None,
    tags: Mapping[str, str] | None = None,
) -> str:
    """Return the MLflow run that a note names, or create a new one.

    A new run gets a mark. The mark finds the run again if the response to its creation was lost, or
    if the process that created it died before it wrote the note.

    Args:
        tracking: the open store.
        workspace: the run's workspace.
        note: the note's name.
        run_name: name of a new run.
        start_time: start of a new run, in milliseconds since the epoch.
        tags: tags of a new run.
    """
    settle(workspace)
    with exclusive(workspace, "creating"):
        remembered = recall(workspace, note)
        if remembered and active_run(tracking, remembered):
            return remembered
        mark = _mark(workspace, note)
        runs = _marked(tracking, f"= '{mark}'")
        if not runs:
            created = _create(tracking, mark, run_name, start_time, tags or {})
            # Without a response, MLflow retries by itself, so there may be two runs now.
            runs = _marked(tracking, f"= '{mark}'") or [created]
        run_id, *doubles = sorted(str(run.info.run_id) for run in runs)
        for double in doubles:
            tracking.client.delete_run(double)
        remember(workspace, note, run_id)
        return run_id


def new_run(
    tracking: Tracking, workspace: Workspace, note: str, *, run_name: str, tags: Mapping[str, str]
) -> Run:
    """Create a run and remember it, without the two searches of `settled_run`.

    For many runs of one process, which calls `adopt_runs` before the first and after the last.
    """
    with exclusive(workspace, "creating"):
        run = _create(tracking, _mark(workspace, note), run_name, None, tags)
        remember(workspace, note, run.info.run_id)
        return run


def adopt_runs(tracking: Tracking, workspace: Workspace) -> None:
    """Remember the runs of this workspace that nobody has noted, and delete the duplicates.

    A run is not noted if the response to its creation was lost, or if its process died right after.
    """
    settle(workspace)
    with exclusive(workspace, "creating"):
        for run in _marked(tracking, f"LIKE '{identity(workspace)}/%'"):
            note = run.data.tags[MARK].partition("/")[2]
            known = recall(workspace, note)
            if not known or (known != run.info.run_id and not active_run(tracking, known)):
                remember(workspace, note, run.info.run_id)
            elif known != run.info.run_id:
                tracking.client.delete_run(run.info.run_id)


def _create(
    tracking: Tracking, mark: str, name: str, start_time: int | None, tags: Mapping[str, str]
) -> Run:
    experiment, tags = tracking.experiment_id, {MARK: mark, **tags}
    return tracking.client.create_run(experiment, start_time, tags, name)


def _marked(tracking: Tracking, condition: str) -> list[Any]:
    search, where = tracking.client.search_runs, [tracking.experiment_id]
    query = f"tags.`{MARK}` {condition}"
    return list(all_items(lambda token: search(where, query, page_token=token)))


def _mark(workspace: Workspace, note: str) -> str:
    return f"{identity(workspace)}/{note}"


def active_run(tracking: Tracking, run_id: str) -> Run | None:
    """Return a run; None if the store does not have it, or if it is deleted."""
    mlflow = import_mlflow()
    try:
        run = tracking.client.get_run(run_id)
    except mlflow.MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
        return None
    return run if run.info.lifecycle_stage == "active" else None


def _params(config: RunConfig) -> dict[str, str]:
    content = config.model_dump(mode="json")
    if config.training.learning_rate is None:
        # Training reports the learning rate that it derives.
        del content["training"]["learning_rate"]
    return dict(flatten(content))


def _describe(client: Any, run_id: str, config: RunConfig) -> None:
    """Write parameters and tags. MLflow never changes a parameter, so only new ones are sent."""
    from mlflow.entities import Param, RunTag

    known = client.get_run(run_id).data.params
    params = [Param(name, text) for name, text in _params(config).items() if name not in known]
    for part in in_batches(params, MAX_PARAMS_A_CALL):
        client.log_batch(run_id, params=part)
    tags = {
        "mlflow.source.name": "steadytrain",
        "steadytrain.run": config.run_id,
        "steadytrain.task": config.data.task,
        "steadytrain.model": config.model_name,
        "steadytrain.config_digest": config.digest(),
        "steadytrain.code_digest": code_digest(),
        **code_origin(),
    }
    client.log_batch(run_id, tags=[RunTag(name, text) for name, text in tags.items()])


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


def read_version(config: RunConfig, workspace: Workspace, address: str) -> tuple[Any, Any]:
    """Return `read_registry`, and the version that `find_version` finds there.

    Raises:
        BadInput, TrackingError: as for both.
    """
    try:
        client = read_registry(config, workspace)
    except BadInput as error:
        raise BadInput(f"{address}: {error.message}", remedy=error.remedy) from error
    return client, find_version(client, resolve_uri(config, workspace), address)


def find_version(client: Any, uri: str, address: str) -> Any:
    """Return the registered version that an address names.

    Args:
        uri: of the tracking store whose registered models the client reads.
        address: NAME@ALIAS or NAME/VERSION, after models:/ or not.

    Raises:
        BadInput: the registry has no such model, alias or version.
        TrackingError: it cannot be used.
    """
    name, at, alias = address.removeprefix("models:/").partition("@")
    registry = registry_uri(uri)
    with tracking_errors(registry):
        try:
            if at:
                return client.get_model_version_by_alias(name, alias)
            model, _, number = name.rpartition("/")
            return client.get_model_version(model, number)
        except import_mlflow().MlflowException as error:
            if error.error_code not in {"RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"}:
                raise
            raise BadInput(
                f"{address}: the registry {shown(registry)} has no such model, alias or version",
                remedy="name one that `steadytrain list` shows as registered, such as "
                "NAME@champion, or give --output or MLFLOW_TRACKING_URI",
            ) from error
