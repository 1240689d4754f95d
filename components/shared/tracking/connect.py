"""Connect to the tracking store: choose it, check it, and explain failures.

The environment may name the MLflow run and the experiment.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Final

from steadytrain.components.shared.cluster import POD_VARIABLE
from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.config.evaluation import TrackingConfig
from steadytrain.components.shared.errors import (
    BadInput,
    SteadytrainError,
    TrackingError,
    with_causes,
)
from steadytrain.components.shared.quantities import duration
from steadytrain.components.shared.redaction import (
    PLACEHOLDER,
    login_of,
    redact,
    secrets_of_address,
)
from steadytrain.components.shared.tracking.pull_sink import run_in_parallel
from steadytrain.components.shared.tracking.store import ensure_store, sqlite_uri
from steadytrain.components.shared.workspace import Workspace

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


CHECK_SECONDS = 30.0
"""Longest wait for the check, once a SQLite store exists."""

_QUIET = {
    "MLFLOW_HTTP_RESPECT_RETRY_AFTER_HEADER": "false",
    "GIT_PYTHON_REFRESH": "quiet",
    "MLFLOW_DISABLE_AGENT_HINT": "true",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}
_TIMEOUTS = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "5",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
}
_PART = 3
"""Shortest part of a password that is redacted in a driver's message, in characters."""
# MLflow's words for an answer that is not its own.
_ANSWER = re.compile(
    r"API request to endpoint \S+ failed with error code (\d+) .*?: '(.*)'", re.DOTALL
)
_REMEDY = (
    "start the server, or fix its address (tracking.uri or MLFLOW_TRACKING_URI) or its "
    "credentials (MLFLOW_TRACKING_USERNAME, _PASSWORD, _TOKEN); with no address at all, the "
    "run tracks to its output folder"
)
_FILE_REMEDY = (
    "make the file readable and writable, or set tracking.uri to another store; if the file is "
    "damaged, restore it from a backup"
)
_OTHER_REMEDY = "fix what the message names"
_ANSWER_REMEDY = (
    "the log of the server says more; once it answers again, start the run again: it continues "
    "where it stopped"
)


@dataclass(frozen=True)
class Tracking:
    """An open tracking store: MLflow's client, and the run's experiment."""

    uri: str
    client: Any
    experiment_id: str


def resolve_uri(config: RunConfig, workspace: Workspace) -> str:
    """Return the store's address: configured, from the environment, or SQLite in the output."""
    stated = config.tracking.uri or os.environ.get("MLFLOW_TRACKING_URI")
    return stated or sqlite_uri(workspace.tracking_store)


def open_tracking(config: RunConfig, workspace: Workspace) -> Tracking:
    """Open the run's store. Create the store and the experiment if they do not exist.

    If MLFLOW_RUN_ID is set, that run's experiment is used.

    Raises:
        BadInput: if MLFLOW_RUN_ID is not an active run of this store, or MLFLOW_EXPERIMENT_ID not
            an experiment.
        TrackingError: if the store cannot be used.
        StorageError: if it does not exist and cannot be written.
    """
    uri = resolve_uri(config, workspace)
    _make_ready(uri, workspace)
    with tracking_errors(uri):
        client = import_mlflow().MlflowClient(uri, registry_uri(uri))
        given = run_from_environment(client, shown(uri))
        if given is not None:
            experiment_id = given.info.experiment_id
        else:
            name = stated_experiment(client, config.tracking.experiment, shown(uri))
            experiment_id = _experiment(client, name, uri, workspace)
    return Tracking(uri, client, experiment_id)


def _make_ready(uri: str, workspace: Workspace) -> None:
    """Import what a store needs, and create a SQLite store if it does not exist."""
    check_installed(uri)
    with tracking_errors(uri):
        import_mlflow()
        if _is_database(uri):
            import_module("mlflow.store.tracking.sqlalchemy_store")
        ensure_store(uri, workspace)


def check_installed(uri: str) -> None:
    """Raise TrackingError if a package is missing that a store needs."""
    if uri.startswith("sqlite") and find_spec("sqlalchemy") is None:
        raise TrackingError(
            f"the tracking store {shown(uri)} cannot be used: SQLAlchemy is not installed; the "
            "image for steps without training does not include it",
            remedy="pip install 'steadytrain[train]', or set tracking.uri or MLFLOW_TRACKING_URI "
            "(on a cluster, in the Secret) to the address of an MLflow server",
        )
    if find_spec("mlflow") is None:
        raise TrackingError(
            f"the tracking store {shown(uri)} cannot be used: MLflow is not installed",
            remedy="pip install 'steadytrain[data]'",
        )


def use_tracking(config: RunConfig, workspace: Workspace) -> Tracking:
    """Point MLflow's own functions in this process at the run's store and experiment.

    Not while another thread sends requests: MLflow sets variables of the environment, which are
    removed again, and a thread that is reading the environment then fails.

    Raises:
        BadInput: if MLFLOW_RUN_ID is not an active run of this store.
        TrackingError: if the store cannot be used.
    """
    tracking = open_tracking(config, workspace)
    mlflow = import_mlflow()
    with preserved_environment(), tracking_errors(tracking.uri):
        mlflow.set_tracking_uri(tracking.uri)
        mlflow.set_registry_uri(registry_uri(tracking.uri))
        mlflow.set_experiment(experiment_id=tracking.experiment_id)
    return tracking


def check_tracking(config: RunConfig, workspace: Workspace) -> None:
    """Check within seconds, before anything expensive, that tracking works.

    Raises:
        BadInput: if MLFLOW_RUN_ID is not an active run of this store.
        TrackingError: if the store is down, hangs, rejects the request, or is not a tracking store.
    """
    uri = resolve_uri(config, workspace)
    # Not timed: how long this takes depends on this machine, not on a server.
    _make_ready(uri, workspace)
    with short_timeouts():
        failure = error_with_timeout(CHECK_SECONDS, lambda: open_tracking(config, workspace))
    if isinstance(failure, TimeoutError):
        raise TrackingError(
            f"the tracking store {shown(uri)} has not answered for {duration(CHECK_SECONDS)}",
            remedy=_REMEDY,
            passing=True,
        )
    if failure is not None:
        raise failure


def import_mlflow() -> Any:
    """Import MLflow without its log output, hints and usage statistics."""
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    import mlflow

    _limit_requests()
    logging.getLogger("mlflow").setLevel(logging.WARNING)
    # It prints the traceback of each error that it also raises, such as that of a full disk.
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)
    for name in ("alembic", "urllib3.connectionpool"):
        logging.getLogger(name).setLevel(logging.ERROR)
    return mlflow


@cache
def _limit_requests() -> None:
    """Send MLflow's requests through the one HTTP client. MLflow has no setting for it."""
    from mlflow.utils import request_utils

    from steadytrain.components.shared.http_client import LimitedAdapter

    # Versions before 3.6 have no adapter of their own.
    name = "TCPKeepAliveHTTPAdapter"
    name = name if hasattr(request_utils, name) else "HTTPAdapter"
    members = {"repeats": lambda _, answer: _has_it(answer)}
    adapter = type("Adapter", (LimitedAdapter, getattr(request_utils, name)), members)
    setattr(request_utils, name, adapter)


def _has_it(answer: Any) -> bool:
    """Return whether the server has the parameters or outputs that it was to get once more.

    MLflow inserts those, where it merges all else. Databases name the constraint differently.
    """
    rejected = answer.status_code == 400 and answer.url.endswith(("/params", "/outputs"))
    return rejected and bool(re.search(r"UNIQUE constraint|[Dd]uplicate", answer.text))


class _ShortTimeouts:
    """Number of threads that need short timeouts, and the variables set for them."""

    turn = threading.Lock()
    wanted = 0
    added: tuple[str, ...] = ()


@contextlib.contextmanager
def short_timeouts() -> Iterator[None]:
    """Use short timeouts for MLflow's requests, unless the environment sets them.

    MLflow's defaults (120 s and 7 retries) would delay a run by minutes.
    """
    with _ShortTimeouts.turn:
        if not _ShortTimeouts.wanted:
            _ShortTimeouts.added = tuple(name for name in _TIMEOUTS if name not in os.environ)
            os.environ.update({name: _TIMEOUTS[name] for name in _ShortTimeouts.added})
        _ShortTimeouts.wanted += 1
    try:
        yield
    finally:
        with _ShortTimeouts.turn:
            _ShortTimeouts.wanted -= 1
            if not _ShortTimeouts.wanted:
                for name in _ShortTimeouts.added:
                    os.environ.pop(name, None)


@contextlib.contextmanager
def tracking_errors(uri: str, *, others: bool = True) -> Iterator[None]:
    """Turn whatever MLflow raises (its own errors, requests', SQLAlchemy's) into TrackingError.

    Args:
        uri: the store's address.
        others: whether errors that the store has nothing to do with can only be MLflow's too.
    """
    try:
        yield
    except SteadytrainError:
        raise
    except Exception as error:
        if not others and not _is_of_store(error):
            raise
        raise TrackingError(
            f"the tracking store {shown(uri)} cannot be used: {_reason(error, uri)}",
            remedy=_remedy(error, uri),
            passing=_is_away(error),
        ) from None  # the original error may contain the address with its password


def _remedy(error: Exception, uri: str) -> str:
    answer = _answer(error)
    if not uri.startswith("sqlite"):
        return _ANSWER_REMEDY if answer and answer[0] in _unavailable() else _REMEDY
    # What MLflow itself rejects says nothing about the file.
    answered = type(error).__name__ == "MlflowException" and "sqlite3." not in str(error)
    return _OTHER_REMEDY if answered else _FILE_REMEDY


def _unavailable() -> frozenset[int]:
    from steadytrain.components.shared.http_client import UNAVAILABLE

    return UNAVAILABLE


def _answer(error: BaseException) -> tuple[int, str] | None:
    """Return the status and the words of a server that answered with an error."""
    for cause in with_causes(error):
        if type(cause).__name__ == "RestException":
            return int(cause.get_http_status_code()), str(cause)  # type: ignore[attr-defined]
        if answer := _ANSWER.search(str(cause)):
            return int(answer[1]), "" if answer[2].lstrip().startswith("<") else answer[2]
    return None


def _is_of_store(error: BaseException) -> bool:
    """Return whether an error comes from a server or a database, not from other work of MLflow."""
    kinds = {type(cause).__module__.partition(".")[0] for cause in with_causes(error)}
    return _answer(error) is not None or bool(kinds & {"requests", "sqlalchemy"})


def _is_away(error: BaseException) -> bool:
    """Return whether an error, or what led to it, says that a server is down or did not answer."""
    from steadytrain.components.shared.http_client import is_absence

    answer = _answer(error)
    if answer is not None and answer[0] in _unavailable():
        return True
    for cause in with_causes(error):
        if is_absence(cause):
            return True
        # A database that is not a file, without a server of MLflow in between.
        if type(cause).__name__ == "OperationalError" and "sqlite3." not in str(cause):
            return True
    return False


def shown(uri: str) -> str:
    """Return an address that is safe to print: without user, password and query."""
    login = login_of(uri)
    # Remove the login first: a password may contain ? or #.
    return re.split("[?#]", uri.replace(f"{login}@", "", 1) if login else uri)[0]


def _reason(error: Exception, uri: str) -> str:
    """Return the reason in one line, without SQL and without the words of an HTTP library."""
    from steadytrain.components.shared.http_client import is_absence, why_absent

    for cause in with_causes(error):
        if is_absence(cause):
            return why_absent(cause)
    answer = _answer(error)
    text = (str(error) if answer is None else answer[1]).replace(uri, shown(uri))
    for part in sorted(secrets_of_address(uri), key=len, reverse=True):
        text = text.replace(part, PLACEHOLDER) if len(part) >= _PART else text
    lines = [line for line in redact(text.partition("[SQL:")[0]).splitlines() if line.strip()]
    first = lines[0] if lines else "" if answer else type(error).__name__
    first = first if len(first) <= 300 else f"{first[:297]}..."
    return first if answer is None else f"it answers {answer[0]}{first and f': {first}'}"


@contextlib.contextmanager
def preserved_environment() -> Iterator[None]:
    """Restore the environment after MLflow was pointed at a store.

    MLflow writes its settings there, where they would look like the user's.
    """
    names = ("MLFLOW_TRACKING_URI", "MLFLOW_REGISTRY_URI", "MLFLOW_EXPERIMENT_ID")
    before = {name: os.environ.get(name) for name in names}
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def _served(uri: str) -> bool:
    """Return whether the address is a server. Otherwise this process opens the store itself."""
    return uri.startswith(("http://", "https://", "databricks"))


def _is_database(uri: str) -> bool:
    """Return whether MLflow needs SQLAlchemy for the address. Folders and servers do not need it.

    The light image has no SQLAlchemy.
    """
    return "://" in uri and not uri.startswith("file:") and not _served(uri)


def registry_uri(uri: str) -> str:
    """Return the address of the registered models of a tracking store."""
    return os.environ.get("MLFLOW_REGISTRY_URI") or uri


def _experiment(client: Any, name: str, uri: str, workspace: Workspace) -> str:
    experiment = client.get_experiment_by_name(name)
    if experiment is None:
        # A server has its own location for artifacts. For a database, MLflow's default is a folder
        # below the current directory.
        artifacts = None if _served(uri) else workspace.tracking_artifacts.as_uri()
        try:
            return str(client.create_experiment(name, artifact_location=artifacts))
        except import_mlflow().MlflowException:
            # Another run may have created it in the meantime.
            experiment = client.get_experiment_by_name(name)
            if experiment is None:
                raise
    if experiment.lifecycle_stage == "deleted":
        raise TrackingError(
            f"the experiment {name!r} of {shown(uri)} has been deleted",
            remedy="restore it (`mlflow experiments restore`), or set another one "
            "(tracking.experiment, MLFLOW_EXPERIMENT_NAME, MLFLOW_EXPERIMENT_ID)",
        )
    return str(experiment.experiment_id)


def error_with_timeout(seconds: float, work: Callable[[], object]) -> BaseException | None:
    """Do the work in a thread that can be abandoned. Return its error, TimeoutError, or None."""
    return run_in_parallel({"tracking-check": work}, lambda _: seconds).get("tracking-check")
