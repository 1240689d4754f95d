"""What the servers of `steadytrain ui` and `steadytrain serve` share: who may connect, and how."""

from __future__ import annotations

import asyncio
import ipaddress
import math
import resource
import socket
from collections.abc import Callable
from types import FrameType
from typing import Any, Final

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from steadytrain.components.shared.errors import BadInput

LOOPBACK: Final = ("127.0.0.1", "localhost", "::1")
SHORTEST_TOKEN: Final = 16
MOST_CONNECTIONS: Final = 512
"""Connections at a time. One more closes another: the pages need this process's descriptors."""
BACKLOG: Final = 16
"""Connections that are accepted at once. With many, new ones would push out one whose request has
not been read yet."""
QUEUE: Final = 512
"""Connections that wait in the kernel to be accepted, at most `net.core.somaxconn`. One more has
its handshake repeated after 1, 3 and 7 s, and its client sends its request into the void."""
_PASSES: Final = QUEUE // BACKLOG + 10
"""Passes of asyncio's loop in which it accepts the connections that wait and reads their requests.
Four do it for BACKLOG connections, and the kernel lets one more wait."""
HEADER_SECONDS: Final = 10.0
"""From a connection, or a later request's first byte, to the end of that request's headers."""


def check_token(host: str, token: str, variable: str) -> None:
    """Reject an address that others can reach without a token that they cannot guess.

    Args:
        variable: the environment variable of the token.

    Raises:
        BadInput: there is no token, or it is too short.
    """
    if (not token and host not in LOOPBACK) or 0 < len(token) < SHORTEST_TOKEN:
        what = "is too short" if token else "is not set, and others can reach that address"
        raise BadInput(
            f"--host {host!r}: {variable} {what}",
            remedy=f"set it to a random text of at least {SHORTEST_TOKEN} characters, for example "
            "from `openssl rand -hex 16`, or leave out --host",
        )


def accepted_hosts(host: str) -> tuple[str, ...]:
    """Return the names that a Host header may have; empty if they cannot be known.

    A server that listens on all addresses does not know its names. It always has a token, and a
    browser sends the cookie only to the name under which the user logged in.
    """
    if host in LOOPBACK:
        return LOOPBACK
    try:
        return () if ipaddress.ip_address(host).is_unspecified else (host.lower(),)
    except ValueError:
        return (host.lower(),)


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens at an address.

    Raises:
        BadInput: this machine does not have the address, or the port is in use.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family)
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise BadInput(
            f"cannot listen on {host}:{port}: {why}",
            remedy="give a free port with --port, and an address of this machine with --host",
        ) from error


def address_of(listener: socket.socket, host: str) -> str:
    """Return the address at which a browser finds a listener."""
    shown = f"[{host}]" if ":" in host else host
    return f"http://{shown}:{listener.getsockname()[1]}"


def host_name(host: str) -> str:
    """Return the name in a Host header, without its port and without the brackets of IPv6."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower()


def serve(
    app: Any, listener: socket.socket, *, stopping: Callable[[], object], seconds: float
) -> None:
    """Serve an ASGI app until SIGINT or SIGTERM. What has arrived by then is answered.

    Requests are not logged: an address may hold names.

    Args:
        stopping: called when it is asked to stop.
        seconds: how long it then waits for answers.
    """
    config = config_of(app, timeout_graceful_shutdown=math.ceil(seconds))
    Server(config, stopping).run(sockets=[listener])


def config_of(app: Any, **options: Any) -> uvicorn.Config:
    """Return how an ASGI app is served. Options of uvicorn replace those that all servers have."""
    known = {
        # uvloop, where it is installed, would drop requests that arrive before the stop.
        "loop": "asyncio",
        "http": Connection,
        "backlog": BACKLOG,
        "access_log": False,
        # Every invalid request is a warning, and anyone may send them.
        "log_level": "error",
        "server_header": False,
        "ws": "none",
    }
    return uvicorn.Config(app, **{**known, **options})


class Server(uvicorn.Server):
    """A server that answers what has arrived when it is asked to stop.

    Args:
        stopping: called when SIGINT or SIGTERM asks it to stop.
    """

    def __init__(self, config: uvicorn.Config, stopping: Callable[[], object]) -> None:
        super().__init__(config)
        self._stopping = stopping

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._stopping()
        super().handle_exit(sig, frame)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        # asyncio accepts as many at once as it lets wait.
        for listener in sockets or ():
            listener.listen(QUEUE)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        # uvicorn closes connections whose request it has not read, and a busy loop is late to read.
        for _ in range(_PASSES):
            await asyncio.sleep(0)
        await super().shutdown(sockets)


class Connection(H11Protocol):
    """A connection. One too many closes the oldest that sends no request, or the oldest of all.

    uvicorn limits neither their number nor how slowly headers arrive.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.began = self.loop.time()
        self._late: asyncio.TimerHandle | None = None
        self._await_headers()
        most = min(MOST_CONNECTIONS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)
        others = [other for other in self.connections if isinstance(other, Connection)]
        others.sort(key=lambda other: (other.is_answered, other.began))
        for other in others[: max(0, len(others) - most)]:
            other.transport.abort()
            self.connections.discard(other)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._await_headers()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Answer a client that has sent its whole request and closed its side; then close.

        uvicorn would close the connection at once, and drop the answer. A client that has gone away
        looks the same until something is sent to it, so an answer that has begun is not continued.
        """
        if not self.is_answered or self.cycle.response_started:
            return False
        self.cycle.keep_alive = False
        return True

    def send_400_response(self, msg: str) -> None:
        """Answer an invalid request; if its answer has begun, close the connection.

        uvicorn would begin a second answer in either order, and log the traceback of that.
        """
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_wait()
        super().connection_lost(exc)

    @property
    def is_answered(self) -> bool:
        """Whether a whole request has come, and its answer has not been sent yet."""
        cycle = self.cycle
        return cycle is not None and not cycle.more_body and not cycle.response_complete

    def _await_headers(self) -> None:
        """Close the connection in HEADER_SECONDS unless a request's headers are complete by then.

        More bytes of the same headers do not prolong that time.
        """
        if self.cycle is not None and not self.cycle.response_complete:
            self._end_wait()
        elif self._late is None:
            self._late = self.loop.call_later(HEADER_SECONDS, self.transport.abort)

    def _end_wait(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None
