"""Support for tests that use MLflow: a store created once, a server."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import itertools
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from steadytrain.components.shared.tracking.connect import import_mlflow

from support.ports import free_port


@pytest.fixture(scope="session")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a store as MLflow creates it; that takes seconds, so create it once and copy it.

    If the tests run in several processes, their temporary folders have the same parent.
    """
    mlflow = import_mlflow()
    _read_migrations_once()
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    path, making = folder / "mlflow.db", folder / "making-mlflow.db"
    with (folder / "store.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            making.unlink(missing_ok=True)
            mlflow.MlflowClient(f"sqlite:///{making}").search_experiments()
            making.rename(path)
    return path


@functools.cache
def _read_migrations_once() -> None:
    """Let MLflow remember its newest migration: to open a store, it reads all 67 of them."""
    from mlflow.store.db import utils

    utils._get_latest_schema_revision = functools.cache(utils._get_latest_schema_revision)


def with_store(output: Path, store: Path) -> Path:
    """Make an output folder with a copy of a store, and return the folder."""
    output.mkdir(parents=True)
    copy_store(store, output)
    return output


def copy_store(store: Path, folder: Path) -> str:
    """Copy a store into a folder, and return its address."""
    shutil.copyfile(store, folder / "mlflow.db")
    return f"sqlite:///{folder / 'mlflow.db'}"


def copy_output(output: Path, copy: Path) -> Path:
    """Copy an output folder whose store names the artifacts by their paths; return the copy."""
    shutil.copytree(output, copy)
    (copy / "mlflow.db").unlink()
    with (
        contextlib.closing(sqlite3.connect(output / "mlflow.db")) as store,
        contextlib.closing(sqlite3.connect(copy / "mlflow.db")) as other,
    ):
        other.executescript("\n".join(store.iterdump()).replace(str(output), str(copy)))
    return copy


@dataclass
class Server:
    """An MLflow server in its own process group.

    `mlflow server` imports MLflow for several seconds just to set these variables and start
    uvicorn, which imports MLflow again. tests/unit/manifests starts that program; this class starts
    uvicorn directly.
    """

    folder: Path
    port: int
    process: subprocess.Popen[bytes] | None = None

    @property
    def uri(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        arguments = {"--host": "127.0.0.1", "--port": str(self.port), "--log-level": "warning"}
        store = f"sqlite:///{self.folder / 'mlflow.db'}"
        settings = {
            "_MLFLOW_SERVER_FILE_STORE": store,
            "_MLFLOW_SERVER_REGISTRY_STORE": store,
            "_MLFLOW_SERVER_ARTIFACT_ROOT": "mlflow-artifacts:/",
            "_MLFLOW_SERVER_ARTIFACT_DESTINATION": str(self.folder / "artifacts"),
            "_MLFLOW_SERVER_SERVE_ARTIFACTS": "true",
            "_MLFLOW_SGI_NAME": "uvicorn",
            "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        }
        program = [sys.executable, "-m", "uvicorn", "mlflow.server.fastapi_app:app"]
        with (self.folder / "log").open("wb") as log:
            self.process = subprocess.Popen(
                [*program, *itertools.chain(*arguments.items())],
                stdout=subprocess.DEVNULL,
                stderr=log,
                start_new_session=True,
                env=os.environ | settings,
            )
        deadline = time.monotonic() + 600
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.uri}/health"):
                return
            assert self.process.poll() is None, (self.folder / "log").read_text()
            time.sleep(0.2)
        raise AssertionError("the MLflow server did not start")

    def kill(self) -> None:
        if self.process is not None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None


@contextlib.contextmanager
def serving(folder: Path, store: Path) -> Iterator[Server]:
    """Run a server on a copy of a store."""
    folder.mkdir(exist_ok=True)
    (folder / "mlflow.db").write_bytes(store.read_bytes())
    server = Server(folder, free_port())
    server.start()
    try:
        yield server
    finally:
        server.kill()


def cut_short(path: Path) -> None:
    """Turn a store into what remains if MLflow is killed while creating it."""
    with contextlib.closing(sqlite3.connect(path)) as store, store:
        store.execute("DELETE FROM experiments")
        store.execute("DROP TABLE endpoint_tags")
        store.execute("UPDATE alembic_version SET version_num = 'bf29a5ff90ea'")
