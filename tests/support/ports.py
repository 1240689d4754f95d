"""Ports of this machine that are free."""

from __future__ import annotations

import fcntl
import getpass
import os
import socket
import tempfile
from pathlib import Path
from typing import Final

_PORTS: Final = range(20_000, 30_000)
"""Linux gives connections ports from 32768 on, so that no other program gets one of these by chance
before a test listens there."""


def free_port() -> int:
    """Return a port on which nothing listens, and which no other test process gets."""
    path = Path(tempfile.gettempdir()) / f"steadytrain-test-port-{getpass.getuser()}"
    with path.open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        port = int(file.read() or _PORTS[os.getpid() % len(_PORTS)])
        for _ in _PORTS:
            port = port + 1 if port + 1 in _PORTS else _PORTS.start
            if _is_free(port):
                file.truncate(0)
                file.write(str(port))
                return port
    raise AssertionError(f"all ports from {_PORTS.start} to {_PORTS.stop - 1} are taken")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
