"""An HTTP endpoint from which Prometheus fetches metrics."""

from __future__ import annotations

import select
import socket
import socketserver
import threading
from collections.abc import Iterator
from typing import Final
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer
from wsgiref.types import StartResponse, WSGIEnvironment

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.registry import Collector

PATH: Final = "/metrics"
CLIENT_SECONDS: Final = 10.0
"""How long a client may take to send its request, or to read a part of the answer."""

_CONNECTION: Final = "steadytrain.connection"
"""Where a request has its socket."""


class Endpoint:
    """Serves metrics on all addresses of this machine, from threads that end with the process.

    Raises:
        OSError: the port is in use, or this process may not listen on it.
    """

    def __init__(self, port: int, collector: Collector) -> None:
        registry = CollectorRegistry(auto_describe=False)
        registry.register(collector)
        self._metrics = make_wsgi_app(registry)
        # An answer belongs to the round in which its metrics were collected.
        self._changed, self._round, self._answered = threading.Condition(), 0, -1
        self._server = _Server(port)
        self._server.set_app(self._app)
        thread = threading.Thread(
            target=self._server.serve_forever,
            kwargs={"poll_interval": 0.1},
            name="prometheus-endpoint",
            daemon=True,
        )
        thread.start()

    def wait_for_scrape(self, seconds: float) -> bool:
        """Wait until metrics collected from now on have been sent. Return whether they were."""
        with self._changed:
            self._round += 1
            return self._changed.wait_for(lambda: self._answered == self._round, seconds)

    def close(self) -> None:
        """Stop listening. Answers that are being sent are not waited for."""
        self._server.shutdown()
        self._server.server_close()

    def _app(self, environment: WSGIEnvironment, start: StartResponse) -> Iterator[bytes]:
        if environment["PATH_INFO"] != PATH:
            start("404 Not Found", [("Content-Type", "text/plain")])
            yield f"the metrics are at {PATH}\n".encode()
            return
        collected = self._round
        yield from self._metrics(environment, start)
        # The server asks for more only after it has sent this.
        if not _has_read_all(environment[_CONNECTION]):
            return
        with self._changed:
            self._answered = max(self._answered, collected)
            self._changed.notify_all()


def _has_read_all(client: socket.socket) -> bool:
    """End the answer, and return whether the other side read it before it closed the connection.

    A system that closes a connection with unread data resets it (RFC 2525, section 2.17).
    """
    readable, _, _ = select.select([client], [], [], 0)
    try:
        if readable and not client.recv(1, socket.MSG_PEEK):
            return False  # It left before it could have the answer.
        client.shutdown(socket.SHUT_WR)
        while client.recv(4096):
            pass
    except OSError:
        return False
    return True


class _Quiet(WSGIRequestHandler):
    """Writes no log, and gives up on a client that hangs."""

    timeout = CLIENT_SECONDS

    def get_environ(self) -> WSGIEnvironment:
        return super().get_environ() | {_CONNECTION: self.connection}

    def log_message(self, *_: object) -> None:
        pass


class _Server(socketserver.ThreadingMixIn, WSGIServer):
    """Answers each request in a thread, so that a slow client delays no other."""

    daemon_threads = True
    request_queue_size = 64
    address_family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET

    def __init__(self, port: int) -> None:
        super().__init__(("", port), _Quiet)

    def server_bind(self) -> None:
        if self.address_family == socket.AF_INET6:
            # Some clusters give pods only addresses of one family; this accepts both.
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        # Not WSGIServer's own, which asks DNS for this machine's name.
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = "", self.server_address[1]
        self.setup_environ()

    def handle_error(self, *_: object) -> None:
        """Ignore a client that went away."""
