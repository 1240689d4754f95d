"""Ports of this machine for processes that meet on it."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator


@contextlib.contextmanager
def reserved_port() -> Iterator[tuple[str, int]]:
    """Yield an address and a port of it that nobody else is given meanwhile.

    A process may still listen there, because this socket does not, and both allow it.
    """
    with socket.socket() as reserving:
        reserving.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserving.bind(("127.0.0.1", 0))
        host, port = reserving.getsockname()
        yield host, port
