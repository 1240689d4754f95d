"""The webhook call with hostile servers: it discloses nothing and never waits long."""

from __future__ import annotations

import contextlib
import http.server
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import requests  # type: ignore[import-untyped]

from steadytrain.components.shared import http_client, webhook

SECRET = "T0KEN-in-the-path"
CHUNK = b"x" * (1 << 20)


class Endpoint(http.server.BaseHTTPRequestHandler):
    """Respond as the server's `act` says, and record each request."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.server.came.append((self.command, self.path, body))  # type: ignore[attr-defined]
        with contextlib.suppress(OSError):
            self.server.act(self)  # type: ignore[attr-defined]

    do_GET = do_POST  # noqa: N815

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def serve() -> Iterator[Any]:
    with contextlib.ExitStack() as servers:

        def start(act: Any) -> Any:
            server: Any = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Endpoint)
            server.act, server.came = act, []
            server.address = f"http://127.0.0.1:{server.server_port}"
            threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
            servers.callback(server.server_close)
            servers.callback(server.shutdown)
            return server

        yield start


def called(monkeypatch: pytest.MonkeyPatch, address: str) -> str:
    monkeypatch.setenv(webhook.VARIABLE, address)
    return webhook.call({"text": "a run failed"})


def accept(handler: Any) -> None:
    handler.send_response(200)
    handler.end_headers()


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_redirect_is_not_followed(serve: Any, monkeypatch: Any, status: int) -> None:
    """The target may be a metadata service, or someone who wants to see what the run reports."""
    inside = serve(accept)

    def redirect(handler: Any) -> None:
        handler.send_response(status)
        handler.send_header("Location", f"{inside.address}/latest/meta-data")
        handler.end_headers()

    outside = serve(redirect)
    told = called(monkeypatch, f"{outside.address}/{SECRET}")
    assert told == f"it returned {status}: redirects are not followed"
    assert len(outside.came) == 1
    assert inside.came == []


@pytest.mark.parametrize("status", [200, 500])
def test_endless_response_is_not_read(serve: Any, monkeypatch: Any, status: int) -> None:
    sent = []

    def flood(handler: Any) -> None:
        handler.send_response(status)
        handler.end_headers()
        while True:
            handler.wfile.write(CHUNK)
            sent.append(1)

    server = serve(flood)
    assert called(monkeypatch, server.address) == ("" if status == 200 else "it returned 500")
    time.sleep(0.3)
    assert len(sent) < 50, "the connection is closed"


def test_endless_headers_are_a_failure(serve: Any, monkeypatch: Any) -> None:
    def flood(handler: Any) -> None:
        handler.send_response(200)
        handler.flush_headers()
        while True:
            handler.wfile.write(b"X-More: more\r\n" * 1000)

    assert called(monkeypatch, serve(flood).address) == "HTTPException"


@pytest.mark.parametrize(
    "address",
    [
        f"file:///{SECRET}",
        f"ftp://127.0.0.1/{SECRET}",
        f"data:,{SECRET}",
        f"gopher://127.0.0.1/{SECRET}",
        f"httpx://127.0.0.1/{SECRET}",
        f"http:///{SECRET}",
        SECRET,
    ],
)
def test_only_http_and_https_are_called(monkeypatch: Any, address: str) -> None:
    assert called(monkeypatch, address) == "the address is not http or https"


def test_scheme_may_be_in_capitals(serve: Any, monkeypatch: Any) -> None:
    server = serve(accept)
    assert called(monkeypatch, server.address.replace("http", "HTTP")) == ""
    assert len(server.came) == 1


def failing(error: Exception) -> Any:
    def post(*_: Any, **__: Any) -> None:
        raise error

    return post


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError(f"cannot call https://me:{SECRET}@host"),
        requests.exceptions.InvalidURL(f"unknown url {SECRET}"),
        requests.ConnectionError(TimeoutError(f"timed out {SECRET}")),
        requests.exceptions.ProxyError(OSError(f"Tunnel connection failed: {SECRET}")),
        requests.exceptions.SSLError(
            ssl.SSLCertVerificationError(1, f"certificate is not valid for '{SECRET}.test'")
        ),
        UnicodeEncodeError("ascii", SECRET, 0, 1, "no"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_no_failure_shows_the_address(
    monkeypatch: Any, capfd: pytest.CaptureFixture[str], error: Exception
) -> None:
    monkeypatch.setattr(http_client.LimitedAdapter, "send", failing(error))
    told = called(monkeypatch, f"https://hooks.test/{SECRET}")
    assert told
    assert told != "None"
    assert SECRET not in told
    assert capfd.readouterr() == ("", ""), "no traceback of the thread's"


@pytest.mark.parametrize("rest", [f":{SECRET}@127.0.0.1:9/", f"\n{SECRET}", f"[{SECRET}"])
def test_broken_address_is_not_repeated(
    monkeypatch: Any, capfd: pytest.CaptureFixture[str], rest: str
) -> None:
    told = called(monkeypatch, f"http://me{rest}")
    assert told
    assert SECRET not in told
    assert capfd.readouterr() == ("", "")


def test_webhook_without_a_listener_is_reported(monkeypatch: Any) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{nobody.getsockname()[1]}/{SECRET}"
        assert called(monkeypatch, address) == "Connection refused"
