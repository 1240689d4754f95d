"""A collector of OpenTelemetry, which keeps what it accepts, and can refuse or hang."""

from __future__ import annotations

import contextlib
import http.server
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@dataclass
class Receiver:
    """A collector.

    spans, metrics: what was accepted, as OTLP's messages, in the order of arrival.
    asked: number of requests by path.
    """

    port: int
    spans: list[Any] = field(default_factory=list)
    metrics: list[Any] = field(default_factory=list)
    raw: list[bytes] = field(default_factory=list)
    status: int = 200
    hangs: threading.Event | None = None
    asked: Counter[str] = field(default_factory=Counter)

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def named(self, name: str) -> list[Any]:
        return [span for span in self.spans if span.name == name]

    def points(self, name: str) -> list[Any]:
        """Return a metric's points, in the order of arrival."""
        found = []
        for metric in self.metrics:
            if metric.name == name:
                found += getattr(metric, metric.WhichOneof("data")).data_points
        return found

    def take(self, path: str, body: bytes) -> int:
        # A test that has seen the request may change these.
        status, hangs = self.status, self.hangs
        self.asked[path] += 1
        if hangs is not None:
            hangs.wait()
        if status == 200:
            self.raw.append(body)
            if path == "/v1/traces":
                traces = ExportTraceServiceRequest.FromString(body)
                for of_resource in traces.resource_spans:
                    for of_scope in of_resource.scope_spans:
                        self.spans += of_scope.spans
            else:
                measured = ExportMetricsServiceRequest.FromString(body)
                for of_resource in measured.resource_metrics:
                    for of_scope in of_resource.scope_metrics:
                        self.metrics += of_scope.metrics
        return status


def attributes(of: Any) -> dict[str, Any]:
    """Return the attributes of a span or a point."""
    return {item.key: getattr(item.value, item.value.WhichOneof("value")) for item in of.attributes}


@contextlib.contextmanager
def receiving(port: int = 0, host: str = "127.0.0.1") -> Iterator[Receiver]:
    """Serve a collector on a port of an address of this machine; port 0 chooses one."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            status = receiver.take(self.path, body)
            with contextlib.suppress(OSError):
                self.send_response(status)
                self.send_header("Content-Length", "0")
                self.end_headers()

        def log_message(self, *arguments: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer((host, port), Handler)
    server.daemon_threads = True
    receiver = Receiver(server.server_port)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield receiver
    finally:
        server.shutdown()
        server.server_close()
