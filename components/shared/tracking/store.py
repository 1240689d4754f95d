"""The SQLite store in a run's output, created atomically by one process.

MLflow itself creates it in place, with about sixty migrations that take seconds to minutes. If they
are interrupted, they leave a file that neither MLflow nor a later run can use or finish.
"""

from __future__ import annotations

import contextlib
import re
import sqlite3
import time
import uuid
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

from steadytrain.components.shared.errors import RunBusy, TrackingError
from steadytrain.components.shared.lease import WAIT_SECONDS, lock
from steadytrain.components.shared.quantities import duration
from steadytrain.components.shared.storage import LocalStorage
from steadytrain.components.shared.storage.local import set_aside
from steadytrain.components.shared.tracking.notes import warn
from steadytrain.components.shared.workspace import Workspace

QUIET_SECONDS = 10.0
"""If nothing wrote to a store for this long, no other MLflow is creating it."""
_BUSY_SECONDS = 20.0
_PLACE = re.compile(r"(file://.*/mlartifacts)(/\d+)?")
_ADDRESSES = (
    ("experiments", "artifact_location"),
    ("runs", "artifact_uri"),
    ("logged_models", "artifact_location"),
    ("model_versions", "storage_location"),
    ("model_versions", "source"),
)
"""Tables and columns with the addresses of artifacts."""
_POLL_SECONDS = 0.2


def sqlite_uri(path: Path) -> str:
    """Return the address of a SQLite file. `?` and `%` in its path are encoded."""
    encoded = str(path).replace("%", "%25").replace("?", "%3F")
    # Without the driver's name, MLflow also creates a folder with the encoded name.
    return f"sqlite:///{path}" if encoded == str(path) else f"sqlite+pysqlite:///{encoded}"


def ensure_store(uri: str, workspace: Workspace) -> None:
    """Create the SQLite store of an address if it does not exist.

    An unfinished store contains nothing: it is moved aside, with a warning in the run's events. Any
    other file is left unchanged.

    Raises:
        TrackingError: if another process has been creating it for WAIT_SECONDS.
        StorageError: if it cannot be written.
        sqlite3.Error: if the existing file is not a store or cannot be read.
    """
    path = _file(uri)
    if path is None:
        return
    if _finished(path):
        if old := follow(uri, workspace):
            warn(
                workspace,
                f"the output folder was moved or copied: the artifacts of {path} were in {old}; "
                f"they are read and written in {workspace.tracking_artifacts} now",
            )
        return
    try:
        with lock(str(workspace.locks), "tracking-store"):
            if path.exists() and not _finished_by_another(path):
                aside = set_aside(path)
                message = f"the tracking store {path} is incomplete and empty; it was"
                warn(workspace, f"{message} moved to {aside}, and a new one is created")
            if not path.exists():
                content = _new_store(workspace.tracking_artifacts)
                LocalStorage(path.parent).write(path.name, content, if_absent=True)
    except RunBusy as error:
        raise TrackingError(
            f"another process has been making the tracking store {path} for "
            f"{duration(WAIT_SECONDS)}",
            remedy=f"if it hangs, end it (fuser {workspace.locks / 'tracking-store.lock'} shows "
            "its process), then start the run again",
        ) from error


def follow(uri: str, workspace: Workspace) -> str:
    """Let a store that was moved or copied with its output read and write artifacts there.

    MLflow stores the absolute address of each artifact folder. A copy has the original's addresses.

    Args:
        uri: address of a store. If it is not the output's own, nothing changes.

    Returns:
        The folder where its artifacts were; "" if they are where its addresses say.

    Raises:
        sqlite3.Error: if the store cannot be read or written.
    """
    path, artifacts = _file(uri), workspace.tracking_artifacts
    if path is None or path != workspace.tracking_store.resolve() or not path.is_file():
        return ""
    address = f"{path.as_uri()}?mode=rw"
    with contextlib.closing(sqlite3.connect(address, _BUSY_SECONDS, uri=True)) as store, store:
        old, new = _artifacts_of(store), artifacts.as_uri()
        if old in ("", new):
            return ""
        before = Path(url2pathname(urlsplit(old).path))
        with contextlib.suppress(OSError):
            if before.samefile(artifacts):
                return ""
        tables = {name for (name,) in store.execute("SELECT name FROM sqlite_master")}
        for table, column in _ADDRESSES:
            if table in tables:
                store.execute(
                    f"UPDATE {table} SET {column} = ? || substr({column}, ?) "
                    f"WHERE {column} = ? OR substr({column}, 1, ?) = ?",
                    (new, len(old) + 1, old, len(old) + 1, f"{old}/"),
                )
    return str(before)


def _artifacts_of(store: sqlite3.Connection) -> str:
    """Return the address of a store's artifacts; "" if they are not in a folder of ours.

    The first experiment is as old as the store.
    """
    if not store.execute("SELECT 1 FROM sqlite_master WHERE name = 'experiments'").fetchone():
        return ""
    rows = store.execute("SELECT artifact_location FROM experiments ORDER BY experiment_id")
    matches = (_PLACE.fullmatch(location or "") for (location,) in rows)
    return next((match[1] for match in matches if match), "")


def exists(uri: str) -> bool:
    """Return whether the store of an address exists. It counts as existing if it is on a server.

    Raises:
        sqlite3.Error: the file is not a store or cannot be read.
    """
    from mlflow.utils.file_utils import local_file_uri_to_path
    from mlflow.utils.uri import is_local_uri

    if path := _file(uri):
        return _finished(path)
    if uri.startswith("sqlite") or not is_local_uri(uri):
        return True
    folder = Path(local_file_uri_to_path(uri))
    return folder.is_dir() and any(folder.iterdir())


def _file(uri: str) -> Path | None:
    """Return the file that a SQLite address names; None if it names none."""
    if not uri.startswith("sqlite"):
        return None
    from sqlalchemy.engine import make_url

    address = make_url(uri)
    if not address.database or address.database == ":memory:" or "uri" in address.query:
        return None
    return Path(address.database).resolve()


def _finished(path: Path) -> bool:
    """Return whether a store is complete. The last thing that MLflow creates is an experiment."""
    if not path.exists():
        return False
    # Not read-only: opening the file rolls back a transaction that a killed process left.
    address = f"{path.as_uri()}?mode=rw"
    with contextlib.closing(sqlite3.connect(address, _BUSY_SECONDS, uri=True)) as store:
        rows = store.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
        tables = {name for (name,) in rows}
        if "experiments" not in tables:
            # With other tables, it belongs to another program. MLflow will report that.
            return bool(tables)
        return store.execute("SELECT 1 FROM experiments LIMIT 1").fetchone() is not None


def _finished_by_another(path: Path) -> bool:
    """Wait for an MLflow that may be creating the store in place, as `mlflow ui` does."""
    changed, since = 0, time.monotonic()
    while not _finished(path):
        now, modified = time.monotonic(), path.stat().st_mtime_ns
        if modified != changed:
            changed, since = modified, now
        if now - since >= QUIET_SECONDS:
            return False
        time.sleep(_POLL_SECONDS)
    return True


def _new_store(artifacts: Path) -> bytes:
    """Return the content of a store without runs.

    It is created in memory, because on disk each migration waits for the disk.

    Args:
        artifacts: where its default experiment stores files.
    """
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    # The name gives a second connection access. The database lasts as long as this connection.
    name = f"file:{uuid.uuid4().hex}?mode=memory&cache=shared"
    with contextlib.closing(sqlite3.connect(name, uri=True)) as memory:
        made = SqlAlchemyStore(f"sqlite:///{name}&uri=true", artifacts.as_uri())
        made.engine.dispose()
        return memory.serialize()
