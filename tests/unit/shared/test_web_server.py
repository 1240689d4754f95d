"""A connection whose headers do not arrive in time is closed; one that is answered is not."""

from __future__ import annotations

import asyncio
import socket
import threading
import time

import pytest
import uvicorn

from steadytrain.components.shared import web_server


@pytest.fixture
def port(monkeypatch):
    """Return the port of a server that answers later than it waits for headers."""
    monkeypatch.setattr(web_server, "HEADER_SECONDS", 2.0)

    async def app(scope, receive, send):
        await asyncio.sleep(3)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"late"})

    config = uvicorn.Config(app, http=web_server.Connection, lifespan="off", log_level="error")
    server, listener = uvicorn.Server(config), web_server.listen("127.0.0.1", 0)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    yield listener.getsockname()[1]
    server.should_exit = True
    thread.join()


def trickle(client, content):
    """Send bytes one by one, a tenth of a second apart, and return how many were taken."""
    sent = 0
    try:
        for byte in content:
            client.sendall(bytes([byte]))
            sent += 1
            time.sleep(0.1)
    except OSError:
        pass
    return sent


def is_closed(client):
    try:
        return client.recv(1) == b""
    except ConnectionResetError:
        return True


REQUEST = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"


def test_headers_that_come_slowly_or_never_end_the_connection(port):
    with (
        socket.create_connection(("127.0.0.1", port), timeout=300) as silent,
        socket.create_connection(("127.0.0.1", port), timeout=300) as slow,
    ):
        assert trickle(slow, REQUEST) < len(REQUEST)
        assert is_closed(silent)


def test_slow_answers_and_second_requests_are_not_cut_off(port):
    with socket.create_connection(("127.0.0.1", port), timeout=300) as client:
        for _ in range(2):
            client.sendall(REQUEST)
            answer = b""
            # The last chunk, which is empty, may arrive after the body.
            while not answer.endswith(b"late\r\n0\r\n\r\n"):
                part = client.recv(4096)
                assert part
                answer += part
        client.sendall(REQUEST[:5])
        assert is_closed(client)
