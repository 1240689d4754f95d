"""What the server does with requests that are not HTTP."""

from __future__ import annotations

import logging
import socket
import threading

import pytest
import uvicorn

from steadytrain.components.shared.web_server import Connection, listen

HEAD = b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n"
BAD = b"-1\r\nxx\r\n"


async def turn_away(scope, receive, send):
    await send(
        {"type": "http.response.start", "status": 421, "headers": [(b"content-length", b"2")]}
    )
    await send({"type": "http.response.body", "body": b"no"})


@pytest.fixture
def address():
    config = uvicorn.Config(turn_away, http=Connection, lifespan="off", log_config=None)
    server, listener = uvicorn.Server(config), listen("127.0.0.1", 0)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    yield listener.getsockname()
    server.should_exit = True
    thread.join()


@pytest.mark.parametrize(
    ("sent", "status"),
    [([HEAD + BAD], b"400"), ([HEAD, BAD], b"421"), ([HEAD, b"0\r\n\r\n"], b"421")],
)
def test_bad_body_gets_one_answer_and_leaves_no_traceback(address, sent, status, caplog):
    with caplog.at_level(logging.ERROR), socket.create_connection(address, timeout=30) as client:
        for part in sent:
            client.sendall(part)
            if part.startswith(HEAD):
                assert client.recv(9999).split()[1] == status
        client.shutdown(socket.SHUT_WR)
        rest = client.makefile("rb").read()
    assert b"HTTP/1.1" not in rest
    assert not caplog.records
