"""A server that answers as a script says, byte by byte if need be."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator

Act = Callable[[socket.socket, bytes], object]
"""What to do with a connection whose request has arrived."""


@contextlib.contextmanager
def answering(act: Act) -> Iterator[str]:
    """Run a server and yield its address."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                threading.Thread(target=answer, args=(connection,), daemon=True).start()

        def answer(connection: socket.socket) -> None:
            with connection, contextlib.suppress(OSError):
                act(connection, received(connection))

        threading.Thread(target=serve, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)


def received(connection: socket.socket) -> bytes:
    """Return a request with its body."""
    request = b""
    while b"\r\n\r\n" not in request:
        part = connection.recv(65536)
        if not part:
            return request
        request += part
    head, _, body = request.partition(b"\r\n\r\n")
    lengths = [int(line[15:]) for line in head.split(b"\r\n") if line.lower()[:15] == LENGTH]
    while lengths and len(body) < lengths[0] and (part := connection.recv(65536)):
        body += part
    return head + b"\r\n\r\n" + body


LENGTH = b"content-length:"
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nConnection: close\r\n"


def dripping(text: bytes, every: float = 0.05) -> Act:
    """Send a text for ever, byte by byte, so that no read ever waits for long."""

    def act(connection: socket.socket, _: bytes) -> None:
        for byte in text:
            connection.sendall(bytes([byte]))
            time.sleep(every)
        while True:
            connection.sendall(b" ")
            time.sleep(every)

    return act


def flooding(connection: socket.socket, _: bytes) -> None:
    """Send a body without an end, as fast as it is read."""
    connection.sendall(HEAD + b"\r\n")
    while True:
        connection.sendall(b" " * 65536)


def saying(body: bytes, status: str = "200 OK", *headers: str) -> Act:
    """Give every request the same answer."""
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", "Connection: close", *headers]
    if not any(line.startswith("Content-Type") for line in headers):
        lines.append("Content-Type: application/json")
    text = "\r\n".join(lines).encode() + b"\r\n\r\n" + body
    return lambda connection, _: connection.sendall(text)
