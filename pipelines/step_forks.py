"""The template process that a local run's steps are forked from, as seen by its parent."""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Self

from steadytrain.components.train.agent.forking import SINGLE_THREADED
from steadytrain.components.train.agent.processes import MARK
from steadytrain.pipelines.step_template import BEGUN, PROGRAM, STATUS


class StepTemplate:
    """A process that has imported what steps need, or is still importing it."""

    def __init__(self, process: subprocess.Popen[bytes], channel: socket.socket) -> None:
        self._process, self._channel = process, channel
        self._received = b""

    @classmethod
    def start(cls, folder: Path, log: int, also_hold: Sequence[int]) -> Self:
        """Start a template as a new program.

        Args:
            folder: the run's folder. It marks the program and the steps as processes of the run.
            log: descriptor that the program's own output goes to.
            also_hold: descriptors that the program and every step inherit.
        """
        channel, theirs = socket.socketpair()
        with theirs:
            # In its own session, so that signals to the terminal's process group do not reach it.
            process = subprocess.Popen(
                [sys.executable, "-m", PROGRAM, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **SINGLE_THREADED, MARK: str(folder)},
                pass_fds=(theirs.fileno(), *also_hold),
                start_new_session=True,
            )
        return cls(process, channel)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def fork(
        self,
        step: str,
        config: Path,
        environment: Mapping[str, str],
        lifeline: int,
        imports: Sequence[str] = (),
    ) -> tuple[int | None, IO[str]]:
        """Start a step in its own session.

        Args:
            config: file with the run's configuration.
            imports: modules that the template imports meanwhile, for the steps after this one.

        Returns:
            The step's process id, or None if the step or the template is dead; and the step's
            output, which ends once the last process that holds it has ended.
        """
        reading, writing = os.pipe()
        output = os.fdopen(reading, encoding="utf-8", errors="replace")
        request = {
            "step": step,
            "config": str(config),
            "environment": dict(environment),
            "imports": list(imports),
        }
        try:
            self._ask(request, [writing, lifeline])
        finally:
            os.close(writing)
        kind, number = self._answer()
        if kind == STATUS:
            # A step that is killed at once never reports that it started.
            self._received = f"{kind} {number}\n".encode() + self._received
        return number if kind == BEGUN else None, output

    def status(self, seconds: float) -> int | None:
        """Return the step's exit status, or the template's if that died; None if it still runs.

        Args:
            seconds: how long to wait for it.
        """
        if b"\n" not in self._received and not select.select([self._channel], [], [], seconds)[0]:
            return None
        _, ended = self._answer()
        # Without an answer, the template is dead: it never exits while it may get requests.
        return ended if ended is not None else self._process.wait() or 1

    def kill(self) -> None:
        """Kill the template, but not its step."""
        self._process.kill()
        self._process.wait()
        self._channel.close()

    def _ask(self, request: Mapping[str, Any], descriptors: Sequence[int]) -> None:
        # If the template has just died, there is no answer either.
        with contextlib.suppress(ConnectionError):
            socket.send_fds(self._channel, [b" "], descriptors)
            self._channel.sendall(json.dumps(request).encode() + b"\n")

    def _answer(self) -> tuple[str, int | None]:
        """Return the next answer's kind and number; "" and None if the template is dead."""
        while b"\n" not in self._received:
            more = b""
            with contextlib.suppress(ConnectionError):
                more = self._channel.recv(4096)
            if not more:
                return "", None
            self._received += more
        line, _, self._received = self._received.partition(b"\n")
        kind, number = line.decode().split()
        return kind, int(number)
