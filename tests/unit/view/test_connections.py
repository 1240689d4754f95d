"""Connections that never send a request do not make the pages unreachable."""

from __future__ import annotations

import contextlib
import resource
import socket
import subprocess
import sys
import threading
import time
import urllib.request

import pytest

pytestmark = pytest.mark.slow

_DESCRIPTORS = 256


@pytest.fixture
def pages(output, make_run, tmp_path):
    """Return the port of `steadytrain ui` with few file descriptors, and its log."""
    make_run("first")
    log = tmp_path / "log"
    command = [sys.executable, "-m", "steadytrain.pipelines.cli", "ui", "-o", output, "--port", "0"]
    with log.open("wb") as errors:
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=errors,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (_DESCRIPTORS, 4096)),
        )
    assert process.stdout is not None
    address = process.stdout.readline().decode().split()[0]
    yield int(address.rpartition(":")[2]), log
    process.terminate()
    process.wait(300)


def answer(port):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=300) as page:
        return page.read().decode()


@pytest.mark.parametrize(
    "begun",
    [
        b"",
        b"GET / HTTP/1.1\r\nHost: 127",
        b"POST /login HTTP/1.1\r\nContent-Length: 9\r\n\r\n",
        b"?\r\n\r\n",
    ],
    ids=["silent", "half a request", "half a form", "not HTTP"],
)
def test_half_open_connections_leave_the_pages_reachable(pages, begun):
    port, log = pages
    held, stopping = [], threading.Event()

    def attack():
        while not stopping.is_set():
            try:
                client = socket.create_connection(("127.0.0.1", port), timeout=60)
                client.sendall(begun)
            except OSError:
                continue
            held.append(client)
            if len(held) > 2 * _DESCRIPTORS:
                held.pop(0).close()

    attacker = threading.Thread(target=attack)
    attacker.start()
    try:
        while len(held) <= _DESCRIPTORS:
            time.sleep(0.01)
        for _ in range(3):
            assert "first" in answer(port)
    finally:
        stopping.set()
        attacker.join()
        for client in held:
            client.close()
    assert log.stat().st_size < 10_000


def test_a_request_in_progress_is_not_given_up_for_a_silent_connection(pages):
    """The stream of an open page."""
    port, _ = pages
    with socket.create_connection(("127.0.0.1", port), timeout=300) as stream:
        stream.sendall(b"GET /events HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        while b"data: changed" not in stream.recv(4096):
            pass
        held = [socket.create_connection(("127.0.0.1", port)) for _ in range(_DESCRIPTORS)]
        assert "first" in answer(port)
        stream.settimeout(0.5)
        received = None
        with contextlib.suppress(TimeoutError):
            while received := stream.recv(4096):
                pass  # it may say that it is alive
        assert received != b"", "it has ended"
        for client in held:
            client.close()
