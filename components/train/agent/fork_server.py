"""A process that has imported what others need, and serves requests with it, on both sides.

The steps of a local run are forked from one (`pipelines/step_template.py`), and the trials of a
study from another (`tune/trials/process.py`). The agent of a local run serves its requests itself,
one attempt after another, because the ranks are to be its own forks (`agent/__main__.py`).

Both sides have one end of a socket. A request is JSON with a process's arguments, environment and
log; its length and descriptors come first. The answers are lines of JSON: BEGUN with the process's
ID, once it leads its own session, and then ENDED with its exit status.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

import psutil

from steadytrain.components.shared.stopping import VARIABLE
from steadytrain.components.train.agent import forking
from steadytrain.components.train.agent.processes import alive

SERVE: Final = "--serve"
"""The first argument of a program that is to serve requests; the socket's descriptor follows."""
BEGUN, ENDED = "begun", "ended"
_PURPOSES = OUTPUT, LIFELINE = "output", "lifeline"
"""What a descriptor of a request is for."""
_DIGITS = 8
"""Of the length of a request, which comes first."""
_LOOK_SECONDS = 0.1


class Request(NamedTuple):
    """A request for a process.

    log: file for its output; "" if a descriptor is for that.
    imports: modules that the server imports while the process runs.
    descriptors: by what they are for.
    """

    number: int
    arguments: Sequence[str]
    environment: Mapping[str, str]
    log: str
    imports: Sequence[str]
    descriptors: Mapping[str, int]

    def become(self) -> None:
        """Give this process the environment and the output of the request."""
        os.environ.clear()
        os.environ.update(self.environment)
        # The folder that was found when this process started may have been removed.
        tempfile.tempdir = None
        if self.log:
            forking.write_to(Path(self.log))
        if OUTPUT in self.descriptors:
            os.dup2(self.descriptors[OUTPUT], sys.stdout.fileno())
            os.dup2(self.descriptors[OUTPUT], sys.stderr.fileno())
            os.close(self.descriptors[OUTPUT])
        if LIFELINE in self.descriptors:
            os.environ[VARIABLE] = str(self.descriptors[LIFELINE])


class _ProcessFailed(BaseException):
    """Ends the imports while a process runs: no other process needs them."""


class Requests:
    """The requests to this process, which serves them.

    Args:
        channel: this process's end of the socket.
        forkable: whether a fork of this process is as good as a new process.

    Attributes:
        last: the newest request.
        statuses: exit status of each process that has ended, by its request's number.
    """

    def __init__(self, channel: socket.socket, *, forkable: bool = True) -> None:
        self._channel, self.forkable = channel, forkable
        channel.set_inheritable(False)
        self.last: Request | None = None
        self.statuses = dict[int, int]()
        self._running = dict[int, int]()
        self._importing = False

    def receive(self) -> Request | None:
        """Return the next request, or None once there will be no more."""
        # If the other side dies before it reads an answer, the connection is reset.
        with contextlib.suppress(ConnectionError):
            length, descriptors, _, _ = socket.recv_fds(self._channel, _DIGITS, len(_PURPOSES))
            # Not more: another request may follow.
            if line := self._channel.recv(int(length or 0), socket.MSG_WAITALL):
                content = json.loads(line)
                named = zip(content.pop("descriptors"), descriptors, strict=True)
                self.last = Request(descriptors=dict(named), **content)
                return self.last
        return None

    def answer(self, kind: str, request: int, value: int) -> None:
        """Answer a request, by its number."""
        with contextlib.suppress(ConnectionError):
            self._channel.sendall(json.dumps([kind, request, value]).encode() + b"\n")

    def fork_each(self, program: str) -> Request | None:
        """Fork a process for each request until there are no more.

        Args:
            program: module that does the same as a fork, for a fork that would not be as good.

        Returns:
            In a fork, its request; it leads its own session, and has its environment and output.
            In this process, None.
        """
        signal.signal(signal.SIGCHLD, self._reap)
        while (request := self.receive()) is not None:
            sys.stdout.flush()
            pid = os.fork()
            if pid == 0:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                os.setsid()
                self.answer(BEGUN, request.number, os.getpid())
                self._channel.close()
                request.become()
                if not self.forkable:
                    command = [sys.executable, "-m", program, *request.arguments]
                    os.execv(sys.executable, command)
                return request
            self._running[pid] = request.number
            for descriptor in request.descriptors.values():
                os.close(descriptor)
            # It may have ended before it was noted.
            self._reap()
            if self.forkable and request.imports:
                self.forkable = self._import_meanwhile(request)
        return None

    def wait(self) -> None:
        """Wait until all forks have ended."""
        for pid in list(self._running):
            self._note(pid, 0)

    def _import_meanwhile(self, request: Request) -> bool:
        """Import modules until the fork fails. Return whether a fork is still as good."""
        failed = None
        try:
            self._importing = True
            if self.statuses.get(request.number):
                return True
            try:
                forking.prepare(request.imports)
            except Exception as error:
                failed = error
            self._importing = False
        except _ProcessFailed:
            return True
        if failed is not None:
            # The process that needs them gets the same error, and reports it.
            forking.start_process("ranks", failed)
            return forking.freeze("steps")
        return forking.possible()

    def _reap(self, *_: object) -> None:
        for pid in list(self._running):
            self._note(pid, os.WNOHANG)

    def _note(self, pid: int, options: int) -> None:
        # The signal may interrupt this very function, after it has learned of the end.
        with contextlib.suppress(ChildProcessError):
            ended, status = os.waitpid(pid, options)
            if ended:
                number, code = self._running.pop(pid), os.waitstatus_to_exitcode(status)
                self.statuses[number] = code
                self.answer(ENDED, number, code)
                if code and self._importing:
                    self._importing = False
                    raise _ProcessFailed


def requests_of(descriptor: str, *, forkable: bool = True) -> Requests:
    """Return the requests to a program, which got SERVE and this descriptor as arguments."""
    return Requests(socket.socket(fileno=int(descriptor)), forkable=forkable)


class ForkServer:
    """The server, as the process that started it sees it. Close it with `kill`.

    served: whether it has answered a request.
    """

    def __init__(
        self, process: subprocess.Popen[bytes] | forking.Forked, channel: socket.socket
    ) -> None:
        self.process, self.served, self._abandoned = process, False, False
        self._channel, self._received = channel, b""
        self._processes = list[Served]()

    @classmethod
    def start(
        cls,
        program: str,
        imports: Iterable[str] = (),
        *,
        environment: Mapping[str, str],
        output: int,
        errors: int = subprocess.STDOUT,
        also_hold: Sequence[int] = (),
    ) -> Self:
        """Start a server as a new program.

        Args:
            program: its module.
            imports: arguments of the program, after the socket.
            also_hold: descriptors that it and its forks inherit.
        """
        channel, theirs = socket.socketpair()
        with theirs:
            # In its own session, so that signals to the terminal's process group do not reach it.
            process = subprocess.Popen(
                [sys.executable, "-m", program, SERVE, str(theirs.fileno()), *imports],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
                env={**environment, **forking.SINGLE_THREADED},
                pass_fds=(theirs.fileno(), *also_hold),
                start_new_session=True,
            )
        return cls(process, channel)

    @classmethod
    def fork(cls, serve: Callable[[Requests], int]) -> Self:
        """Fork a server from this process into a new session."""
        channel, theirs = socket.socketpair()
        with theirs:
            process = forking.Forked(partial(_serve, serve, theirs, channel), dict(os.environ))
        return cls(process, channel)

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def request(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        log: Path | None = None,
        *,
        descriptors: Mapping[str, int] | None = None,
        imports: Sequence[str] = (),
    ) -> Served:
        """Request a process; return at once, though the server may still be importing."""
        sent = descriptors or {}
        content: dict[str, Any] = {
            "number": len(self._processes),
            "arguments": arguments,
            "environment": dict(environment),
            "log": str(log or ""),
            "imports": imports,
            "descriptors": list(sent),
        }
        served = Served(self)
        self._processes.append(served)
        # If the server has just died, `Served` notices that.
        with contextlib.suppress(ConnectionError):
            line = json.dumps(content).encode()
            length = f"{len(line):0{_DIGITS}}".encode()
            socket.send_fds(self._channel, [length], list(sent.values()))
            self._channel.sendall(line)
        return served

    def read_answers(self, seconds: float = 0.0) -> None:
        """Read the answers that have arrived.

        Args:
            seconds: how long to wait for the first one.
        """
        while self._channel.fileno() >= 0:
            if not select.select([self._channel], [], [], seconds)[0]:
                return
            more, seconds = b"", 0.0
            with contextlib.suppress(ConnectionError):
                more = self._channel.recv(4096)
            if not more:
                return
            *lines, self._received = (self._received + more).split(b"\n")
            for line in lines:
                kind, number, value = json.loads(line)
                self._processes[number].note(kind, value)
                self.served = True

    def kill(self) -> None:
        """Kill the server, but not its forks."""
        self.process.kill()
        if not self._abandoned:
            self.process.wait()
        self.read_answers()
        self._channel.close()

    def abandon(self) -> None:
        """Do not wait for the server from now on, because it cannot be killed."""
        self._abandoned = True
        if isinstance(self.process, forking.Forked):
            self.process.abandon()


class Served:
    """The process that serves a request."""

    def __init__(self, server: ForkServer) -> None:
        self._server = server
        self._process: psutil.Process | None = None
        self._begun = False
        self._status: int | None = None

    def note(self, kind: str, value: int) -> None:
        """Receive an answer."""
        if kind == ENDED:
            self._status = value
            return
        self._begun = True
        with contextlib.suppress(psutil.NoSuchProcess):
            self._process = psutil.Process(value)

    @property
    def started(self) -> bool:
        """Whether the process has been forked; it may have ended since."""
        self._server.read_answers()
        return self._begun

    @property
    def pid(self) -> int | None:
        """The process ID while the process runs."""
        process = self._process if self.started and self._status is None else None
        return process.pid if process and alive(process) else None

    def ended(self) -> bool:
        """Return whether the process has ended, or will never start."""
        # In this order: it may have been forked just before the server died.
        lost = not self._server.alive
        return self.pid is None and (self._begun or self._status is not None or lost)

    def wait_for_start(self) -> int | None:
        """Return the process ID once it has been forked; None if it or the server is dead."""
        while not self._begun and self._status is None:
            lost = not self._server.alive
            self._server.read_answers(_LOOK_SECONDS)
            if lost:
                break
        return self.pid

    def wait(self, seconds: float) -> int | None:
        """Return the exit status, or the server's if that died; None if the process still runs.

        Args:
            seconds: how long to wait for it.
        """
        deadline = time.monotonic() + seconds
        while self._status is None:
            lost, left = self._server.process.poll(), deadline - time.monotonic()
            self._server.read_answers(min(_LOOK_SECONDS, max(0.0, left)))
            if self._status is None and lost is not None:
                return lost or 1
            if left <= 0:
                break
        return self._status


def _serve(serve: Callable[[Requests], int], channel: socket.socket, theirs: socket.socket) -> int:
    theirs.close()
    # Ctrl-C in the terminal then reaches only the process that forked this one.
    os.setsid()
    return serve(Requests(channel))
