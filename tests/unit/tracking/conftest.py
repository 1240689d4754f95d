"""Real MLflow stores and servers; a server that hangs, and one that is not MLflow."""

from __future__ import annotations

import contextlib
import http.server
import itertools
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from steadytrain.components.shared.config import RunConfig, from_mapping
from steadytrain.components.shared.workspace import Workspace

from support.proxy import Proxy, proxy_to
from support.stores import empty_store, own_environment

__all__ = ["empty_store", "own_environment"]


@pytest.fixture
def make_config(tmp_path: Path) -> Callable[..., RunConfig]:
    def make(**sections: Any) -> RunConfig:
        content = {
            "name": "small",
            "output": str(tmp_path / "output"),
            "data": {"source": ["data.jsonl"]},
            "model": {"config": {"model_type": "gpt2"}},
        }
        return from_mapping(content | sections)

    return make


@pytest.fixture
def config(make_config: Callable[..., RunConfig]) -> RunConfig:
    return make_config()


@pytest.fixture
def workspace(config: RunConfig, empty_store: Path) -> Workspace:
    workspace = Workspace.of(config)
    workspace.create()
    workspace.tracking_store.write_bytes(empty_store.read_bytes())
    return workspace


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


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


@pytest.fixture
def server(tmp_path: Path, empty_store: Path) -> Iterator[Server]:
    """A server that the test starts and kills."""
    folder = tmp_path / "server"
    folder.mkdir()
    (folder / "mlflow.db").write_bytes(empty_store.read_bytes())
    server = Server(folder, free_port())
    yield server
    server.kill()


@pytest.fixture(scope="module")
def lasting_server(tmp_path_factory: pytest.TempPathFactory, empty_store: Path) -> Iterator[Server]:
    """A server that is up, for all tests of a module."""
    folder = tmp_path_factory.mktemp("server")
    (folder / "mlflow.db").write_bytes(empty_store.read_bytes())
    server = Server(folder, free_port())
    server.start()
    yield server
    server.kill()


@pytest.fixture
def proxy(lasting_server: Server) -> Iterator[Proxy]:
    """A proxy before the lasting server."""
    with proxy_to(lasting_server.port) as proxy:
        yield proxy


@pytest.fixture
def silent_uri() -> Iterator[str]:
    """A server that accepts connections and never says a word."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(64)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


@pytest.fixture
def answer() -> Iterator[Callable[[int, str], str]]:
    """Starts a server that answers everything alike; gives its address."""
    servers = []

    def start(status: int, body: str) -> str:
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(status)
                self.end_headers()
                self.wfile.write(body.encode())

            do_POST = do_GET  # noqa: N815

            def log_message(self, *arguments: object) -> None:
                pass

        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()
