"""Connections are answered once, and closed if their headers do not arrive in time."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import socket
import threading
import time

import pytest
import uvicorn

from steadytrain.components.shared import web_server

from support.web import served


@pytest.fixture
def port(monkeypatch):
    """Return the port of a server that answers later than it waits for headers."""
    monkeypatch.setattr(web_server, "HEADER_SECONDS", 6.0)

    async def app(scope, receive, send):
        await asyncio.sleep(7)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"late"})

    with served(app, timeout_keep_alive=300) as (number, _):
        yield number


def trickle(client, content):
    """Send bytes one by one, a tenth of a second apart, until the connection ends."""
    with contextlib.suppress(OSError):
        for byte in content:
            client.sendall(bytes([byte]))
            time.sleep(0.1)


def is_closed(client):
    try:
        return client.recv(1) == b""
    except ConnectionResetError:
        return True


REQUEST = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.mark.slow
def test_headers_that_come_slowly_or_never_end_the_connection(port):
    with (
        socket.create_connection(("127.0.0.1", port), timeout=300) as silent,
        socket.create_connection(("127.0.0.1", port), timeout=300) as slow,
    ):
        trickle(slow, itertools.chain(REQUEST[:-2], b"X: ", itertools.repeat(ord("x"))))
        assert is_closed(silent)


@pytest.mark.slow
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


def test_client_that_has_closed_its_side_gets_its_answer(port):
    with socket.create_connection(("127.0.0.1", port), timeout=300) as client:
        client.sendall(REQUEST)
        client.shutdown(socket.SHUT_WR)
        answer = client.makefile("rb").read()
    assert answer.startswith(b"HTTP/1.1 200")
    assert b"late" in answer


@pytest.mark.parametrize("begun", [b"", REQUEST[:5]])
def test_connection_without_a_whole_request_ends_when_the_client_closes_its_side(begun, port):
    with socket.create_connection(("127.0.0.1", port), timeout=300) as client:
        client.sendall(begun)
        client.shutdown(socket.SHUT_WR)
        assert client.makefile("rb").read() == b""


HEAD = b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n"
BAD = b"-1\r\nxx\r\n"


async def turn_away(scope, receive, send):
    await send(
        {"type": "http.response.start", "status": 421, "headers": [(b"content-length", b"2")]}
    )
    await send({"type": "http.response.body", "body": b"no"})


@pytest.mark.parametrize(
    ("sent", "status"),
    [([HEAD + BAD], b"400"), ([HEAD, BAD], b"421"), ([HEAD, b"0\r\n\r\n"], b"421")],
)
def test_bad_body_gets_one_answer_and_leaves_no_traceback(sent, status, caplog):
    with (
        caplog.at_level(logging.ERROR),
        served(turn_away, log_config=None) as (port, _),
        socket.create_connection(("127.0.0.1", port), timeout=300) as client,
    ):
        for part in sent:
            client.sendall(part)
            if part.startswith(HEAD):
                assert client.recv(9999).split()[1] == status
        client.shutdown(socket.SHUT_WR)
        rest = client.makefile("rb").read()
    assert b"HTTP/1.1" not in rest
    assert not caplog.records


def test_requests_that_arrive_before_the_stop_are_answered():
    busy, go_on = threading.Event(), threading.Event()

    def connect(port):
        return clients.enter_context(socket.create_connection(("127.0.0.1", port), timeout=300))

    async def look(counter):
        busy.set()
        go_on.wait()  # like a loop that others keep from running
        return await uvicorn.Server.on_tick(server, counter)

    with served(turn_away) as (port, server), contextlib.ExitStack() as clients:
        known = connect(port)
        known.sendall(REQUEST)
        answer = b""
        while not answer.endswith(b"no"):
            answer += known.recv(9999)
        server.on_tick = look
        assert busy.wait(300)
        # The kernel clamps the queue, on old systems at 128, and lets one more wait.
        connected = [known, *(connect(port) for _ in range(120))]
        for client in connected:
            client.sendall(REQUEST)
        server.should_exit = True
        go_on.set()
        answers = [client.makefile("rb").readline().split()[1] for client in connected]
    assert answers == [b"421"] * len(connected)
