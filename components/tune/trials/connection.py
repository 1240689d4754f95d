"""A driver's connection to the server of its trials."""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from steadytrain.components.shared.logs.output import open_log
from steadytrain.components.shared.storage import LocalStorage
from steadytrain.components.train.agent.processes import MARK, end_processes, processes_of
from steadytrain.components.tune.trials.place import server_log, trials_of
from steadytrain.components.tune.trials.slots import Slot

_ADDRESS: Final = "server.json"
_PROGRAM = "steadytrain.components.tune.trials.server"
_GREETING_SECONDS = 60.0
"""How long a server may take to greet a driver; it may still be importing."""
_LEAVE_SECONDS = 30.0
"""How long processes without a server have to stop with a checkpoint, before they are killed."""
_LOOK_SECONDS = 0.1
_VARIABLES = {
    # These libraries would start threads on import, and a process with threads cannot be forked.
    "OPENBLAS_NUM_THREADS": "1",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
}


class Connection:
    """A connection to a server (see server.py for what the two say).

    running: the running trials when this driver connected, and until which steps. None before the
        server has greeted.
    slots: how many trials train at once; 0 before the server has greeted.
    given_up: the class and message of the failure of each trial that the server gave up.
    """

    def __init__(self, connected: socket.socket) -> None:
        self.running: dict[int, int] | None = None
        self.given_up: dict[int, tuple[str, str]] = {}
        self.slots = 0
        self._socket, self._received = connected, b""

    def say(self, request: Mapping[str, Any]) -> None:
        """Send a request. If the server is dead, `messages` notices that."""
        with contextlib.suppress(ConnectionError):
            self._socket.sendall(json.dumps(request).encode() + b"\n")

    def messages(self, seconds: float) -> list[int] | None:
        """Return the trials that have ended since the last call; None if the server is dead.

        Args:
            seconds: how long to wait for a message.
        """
        if not select.select([self._socket], [], [], seconds)[0]:
            return []
        content = b""
        with contextlib.suppress(ConnectionError):
            content = self._socket.recv(1 << 16)
        if not content:
            return None
        *lines, self._received = (self._received + content).split(b"\n")
        return [number for line in lines for number in self._heard(json.loads(line))]

    def _heard(self, message: Mapping[str, Any]) -> Sequence[int]:
        if "running" in message:
            self.running, self.slots = dict(message["running"]), message["slots"]
            return ()
        if "failure" in message:
            self.given_up[message["ended"]] = message["failure"], message["error"]
        return (message["ended"],)


def start_server(
    study: Path, slots: Sequence[Slot], linger_seconds: float, imports: Sequence[str]
) -> Connection:
    """Start a server and connect to it. It imports in the background.

    Args:
        slots: one for each trial that trains at once, with the same threads.
        linger_seconds: how long it waits for a new driver.
        imports: the modules that the processes of trials share.
    """
    folder = trials_of(study)
    folder.mkdir(parents=True, exist_ok=True)
    # Not in the study: the path of a socket has at most 107 bytes.
    address = str(Path(tempfile.mkdtemp(prefix="steadytrain-")) / "socket")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        LocalStorage(folder).write(_ADDRESS, json.dumps({"address": address}).encode())
        shares = json.dumps([asdict(slot) for slot in slots])
        arguments = [str(study), str(listener.fileno()), shares, str(linger_seconds), *imports]
        # What torch computes with is decided when it is imported.
        threads = {"OMP_NUM_THREADS": str(slots[0].threads)}
        with os.fdopen(open_log(server_log(study)), "ab") as log:
            # In its own session, so that Ctrl-C in the terminal reaches only the driver.
            subprocess.Popen(
                [sys.executable, "-m", _PROGRAM, *arguments],
                env={**os.environ, **_VARIABLES, **threads, MARK: str(folder)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(listener.fileno(),),
                start_new_session=True,
            )
        return _connect(address)


def greeted(folder: Path) -> Connection | None:
    """Connect to the server that an earlier driver started; None if it is dead or hangs.

    Args:
        folder: of the study's trials.
    """
    try:
        address = json.loads((folder / _ADDRESS).read_bytes())["address"]
        found = _connect(address)
    except (OSError, ValueError):
        return None
    deadline = time.monotonic() + _GREETING_SECONDS
    while found.running is None and time.monotonic() < deadline:
        if found.messages(_LOOK_SECONDS) is None:
            return None
    return found if found.running is not None else None


def end_leftovers(folder: Path) -> None:
    """End all processes of the trials. They have a while to stop with a checkpoint by themselves.

    Args:
        folder: of the study's trials.
    """
    deadline = time.monotonic() + _LEAVE_SECONDS
    while processes_of(folder) and time.monotonic() < deadline:
        time.sleep(_LOOK_SECONDS)
    end_processes(folder)


def _connect(address: str) -> Connection:
    connected = socket.socket(socket.AF_UNIX)
    try:
        connected.connect(address)
    except OSError:
        connected.close()
        raise
    return Connection(connected)
