"""Real MLflow stores and servers, a server that hangs, and one that is not MLflow."""

from __future__ import annotations

import http.server
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from steadytrain.components.shared.config import RunConfig, from_mapping
from steadytrain.components.shared.workspace import Workspace

from support.ports import free_port
from support.proxy import Proxy, proxy_to
from support.stores import Server, empty_store, serving

__all__ = ["empty_store"]


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


@pytest.fixture
def server(tmp_path: Path, empty_store: Path) -> Iterator[Server]:
    """A server that the test starts and kills."""
    folder = tmp_path / "server"
    folder.mkdir()
    (folder / "mlflow.db").write_bytes(empty_store.read_bytes())
    server = Server(folder, free_port())
    yield server
    server.kill()


@pytest.fixture(scope="session")
def lasting_server(tmp_path_factory: pytest.TempPathFactory, empty_store: Path) -> Iterator[Server]:
    """A running server that all tests share."""
    with serving(tmp_path_factory.mktemp("server"), empty_store) as server:
        yield server


@pytest.fixture
def proxy(lasting_server: Server) -> Iterator[Proxy]:
    """A proxy in front of the shared server."""
    with proxy_to(lasting_server.port) as proxy:
        yield proxy


@pytest.fixture
def silent_uri() -> Iterator[str]:
    """The address of a server that accepts connections and never answers."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(64)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


@pytest.fixture
def answer() -> Iterator[Callable[[int, str], str]]:
    """Start a server that gives every request the same answer, and return its address."""
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
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()
