"""A proxy on loopback for a real server, which injects the faults that a test requests."""

from __future__ import annotations

import collections
import contextlib
import http.client
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal

Fault = Literal["forward", "lose", "late", "reset", "hang", "403", "500", "503", "truncate"]
"""What happens to a request:

forward: the server's response.
late: the server's response, but only after `let_on` is set.
lose: the server handles the request, but its response is lost.
reset: the connection is reset before the request is read.
hang: no response until the test ends.
403, 500, 503: an error with this status, as S3 sends it (503 is SlowDown, retry in an hour).
truncate: half of the response body, then the connection is reset.
"""

S3_CODES = {403: "AccessDenied", 500: "InternalError", 503: "SlowDown"}


class Proxy:
    """Forwards to 127.0.0.1:`port` and injects faults.

    Attributes:
        usual: the fault for requests that get no queued fault.
        hidden: lower-case names of headers that are not forwarded.
        queued: faults for the next requests that match `concerns`, in order.
        seen: "METHOD path" of every request.
        answered: "METHOD path" of every request that the server has answered.
        done: all faults that have been used; "late" as soon as its request is here, body and all.
    """

    def __init__(self, port: int) -> None:
        self.target = port
        self.usual: Fault = "forward"
        self.queued: collections.deque[Fault] = collections.deque()
        self.concerns: Callable[[str, str], bool] = lambda _method, _path: True
        self.hidden: set[str] = set()
        self.seen: list[str] = []
        self.answered: list[str] = []
        self.done: set[Fault] = set()
        self.ended, self.let_on = threading.Event(), threading.Event()
        self._turn = threading.Lock()
        self._server = ThreadingHTTPServer(
            ("127.0.0.1", 0), type("Handler", (_Handler,), {"proxy": self})
        )
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    @property
    def uri(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def fault(self, method: str, path: str) -> Fault:
        """Return the fault for this request."""
        with self._turn:
            self.seen.append(f"{method} {path}")
            picked = self.queued and self.concerns(method, path)
            fault = self.queued.popleft() if picked else self.usual
            if fault != "late":
                self.done.add(fault)
            return fault

    def close(self) -> None:
        self.ended.set()
        self.let_on.set()
        self._server.shutdown()
        self._server.server_close()


@contextlib.contextmanager
def proxy_to(port: int) -> Iterator[Proxy]:
    """Run a proxy for the duration of the context."""
    proxy = Proxy(port)
    try:
        yield proxy
    finally:
        proxy.close()


class _Handler(BaseHTTPRequestHandler):
    proxy: Proxy
    protocol_version = "HTTP/1.1"

    def handle_one_request(self) -> None:
        with contextlib.suppress(OSError):
            super().handle_one_request()

    def answer(self) -> None:
        fault = self.proxy.fault(self.command, self.path)
        if fault == "reset":
            self._reset()
            return
        if fault == "hang":
            self.proxy.ended.wait()
            self._reset()
            return
        if self.headers.get("Expect", "").lower() == "100-continue":
            self.send_response_only(100)
            self.end_headers()
        body = self._body()
        if fault in ("403", "500", "503"):
            self._refuse(int(fault))
            return
        if fault == "late":
            self.proxy.done.add(fault)
            self.proxy.let_on.wait()
        status, headers, content = self._forward(body)
        self.proxy.answered.append(f"{self.command} {self.path}")
        if fault == "lose":
            self._reset()
            return
        self.send_response_only(status)
        for name, value in headers:
            if name.lower() not in ("transfer-encoding", "connection", "content-length"):
                self.send_header(name, value)
        length = {name.lower(): value for name, value in headers}.get("content-length")
        known = length if self.command == "HEAD" and length else str(len(content))
        self.send_header("Content-Length", known)
        self.end_headers()
        if fault == "truncate":
            self.wfile.write(content[: len(content) // 2])
            self._reset()
            return
        self.wfile.write(content)

    do_GET = do_POST = do_PUT = do_DELETE = do_HEAD = do_PATCH = answer  # noqa: N815

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() == "chunked":
            return b"".join(self._chunks())
        size = int(self.headers.get("Content-Length", 0))
        body = self.rfile.read(size)
        if len(body) < size:
            raise ConnectionResetError("the client is gone")
        return body

    def _chunks(self) -> Iterator[bytes]:
        """Yield the raw chunks of the body, so that signatures remain valid."""
        while True:
            line = self.rfile.readline()
            if not line:
                raise ConnectionResetError("the client is gone")
            size = int(line.split(b";")[0], 16)
            yield line + self.rfile.read(size + 2)
            if not size:
                return

    def _forward(self, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
        server = http.client.HTTPConnection("127.0.0.1", self.proxy.target)
        try:
            server.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                if name.lower() not in {"connection", "expect", *self.proxy.hidden}:
                    server.putheader(name, value)
            server.endheaders(body)
            answer = server.getresponse()
            return answer.status, answer.getheaders(), answer.read()
        finally:
            server.close()

    def _refuse(self, status: int) -> None:
        content = f"<Error><Code>{S3_CODES[status]}</Code></Error>".encode()
        self.send_response_only(status)
        self.send_header("Content-Length", str(len(content)))
        if status == 503:
            self.send_header("Retry-After", "3600")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def _reset(self) -> None:
        """Close the connection with RST instead of FIN."""
        self.wfile.flush()
        option = struct.pack("ii", 1, 0)
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, option)
        self.connection.shutdown(socket.SHUT_RD)
        self.close_connection = True

    def log_message(self, *arguments: Any) -> None:
        pass
