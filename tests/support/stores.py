"""For the tests that use MLflow: a clean environment, a store made once, a server."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
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


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("MLFLOW_"):
            monkeypatch.delenv(name)


@pytest.fixture(scope="session")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store as MLflow creates it, which takes some seconds: made once, copied often."""
    path = tmp_path_factory.mktemp("store") / "mlflow.db"
    import_mlflow().MlflowClient(f"sqlite:///{path}").search_experiments()
    return path


@dataclass
class Server:
    """An MLflow server in its own process group."""

    folder: Path
    port: int
    process: subprocess.Popen[bytes] | None = None

    @property
    def uri(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        arguments = {
            "--host": "127.0.0.1",
            "--port": str(self.port),
            "--workers": "1",
            "--backend-store-uri": f"sqlite:///{self.folder / 'mlflow.db'}",
            "--artifacts-destination": str(self.folder / "artifacts"),
        }
        with (self.folder / "log").open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "mlflow", "server", *itertools.chain(*arguments.items())],
                stdout=subprocess.DEVNULL,
                stderr=log,
                start_new_session=True,
                env=os.environ | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"},
            )
        deadline = time.monotonic() + 120
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
    """A server that is up, on a copy of a store."""
    folder.mkdir(exist_ok=True)
    (folder / "mlflow.db").write_bytes(store.read_bytes())
    server = Server(folder, free_port())
    server.start()
    try:
        yield server
    finally:
        server.kill()
