"""Prometheus as a sink of the event stream: an HTTP endpoint with the run's metrics."""

from __future__ import annotations

import contextlib
import io
import os
import select
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import accumulate
from typing import Any, Final
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer
from wsgiref.types import StartResponse, WSGIEnvironment

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from steadytrain.components.observe.background import CLOSE_SECONDS, Background
from steadytrain.components.observe.metrics import (
    COMMON_LABELS,
    METRICS,
    Distribution,
    Metric,
    Samples,
)
from steadytrain.components.observe.run_metrics import LiveMetrics
from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.workspace import Workspace

PATH: Final = "/metrics"
CLIENT_SECONDS: Final = 10.0
"""Longest time for a client's request and its whole answer."""
MOST_CONNECTIONS: Final = 16
"""Connections at a time. A new one closes the oldest: this process needs its file descriptors."""
LARGEST_REQUEST: Final = 8192
"""Bytes of a request with its headers."""

_CONNECTION: Final = "steadytrain.connection"
"""Where a request has its socket."""
_ALL: Final = ""
_NO_DESCRIPTOR_SECONDS: Final = 0.5
"""How long to accept nothing after an error, such as a lack of file descriptors."""


def default_host() -> str:
    """Return where to listen: in a pod on all addresses, elsewhere only on this machine's own."""
    return _ALL if "KUBERNETES_SERVICE_HOST" in os.environ else "127.0.0.1"


class Endpoint:
    """Serves metrics from threads that end with the process.

    Args:
        port: TCP port.
        collector: collects the metrics for each request.
        host: address or name to listen on; "" means all addresses of this machine.

    Raises:
        OSError: the port is in use, or this process may not listen there.
    """

    def __init__(self, port: int, collector: Collector, host: str = _ALL) -> None:
        registry = CollectorRegistry(auto_describe=False)
        registry.register(collector)
        self._metrics = make_wsgi_app(registry)
        # An answer belongs to the round in which its metrics were collected.
        self._changed, self._round, self._answered = threading.Condition(), 0, -1
        self._server = _Server(host, port)
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
    # Not select.select, which fails on descriptors from 1024 on.
    waiting = select.poll()
    try:
        waiting.register(client, select.POLLIN)
        if waiting.poll(0) and not client.recv(1, socket.MSG_PEEK):
            return False  # It left before it could have the answer.
        client.shutdown(socket.SHUT_WR)
        while client.recv(4096):
            pass
    except OSError:
        return False
    return True


class _Handler(WSGIRequestHandler):
    """Reads one short request, and writes no log."""

    timeout = CLIENT_SECONDS

    def setup(self) -> None:
        super().setup()
        self.rfile.close()
        self.rfile = io.BytesIO(self._head())

    def _head(self) -> bytes:
        """Return the request up to the empty line; b"" if it is too large or ends before that."""
        head = b""
        while b"\r\n\r\n" not in head:
            part = self.connection.recv(LARGEST_REQUEST)
            head += part
            if not part or len(head) > LARGEST_REQUEST:
                return b""
        return head

    def get_environ(self) -> WSGIEnvironment:
        return super().get_environ() | {_CONNECTION: self.connection}

    def log_message(self, *_: object) -> None:
        pass


class _Server(socketserver.ThreadingMixIn, WSGIServer):
    """Answers each request in a thread, so that a slow client delays no other."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, host: str, port: int) -> None:
        self._began: dict[socket.socket, float] = {}
        self._turn = threading.Lock()
        family, address = socket.AF_INET, host
        if host != _ALL:
            family, _, _, _, resolved = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            address = str(resolved[0])
        elif socket.has_dualstack_ipv6():
            family = socket.AF_INET6
        self.address_family = family
        super().__init__((address, port), _Handler)

    def server_bind(self) -> None:
        if self.address_family == socket.AF_INET6 and self.server_address[0] == _ALL:
            # Some clusters give pods only addresses of one family; this accepts both.
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        # Not WSGIServer's own, which asks DNS for this machine's name.
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = "", self.server_address[1]
        self.setup_environ()

    def get_request(self) -> tuple[socket.socket, Any]:
        try:
            client, address = super().get_request()
        except OSError:
            # The connection stays in the queue, and the listener ready to accept it.
            time.sleep(_NO_DESCRIPTOR_SECONDS)
            raise
        with self._turn:
            self._began[client] = time.monotonic()
            for surplus in list(self._began)[:-MOST_CONNECTIONS]:
                self._end(surplus)
        return client, address

    def service_actions(self) -> None:
        """End the connections that take too long."""
        with self._turn:
            late = time.monotonic() - CLIENT_SECONDS
            for client in [client for client, began in self._began.items() if began < late]:
                self._end(client)

    def _end(self, client: socket.socket) -> None:
        """Make a connection's thread close it."""
        del self._began[client]
        with contextlib.suppress(OSError):
            client.shutdown(socket.SHUT_RDWR)

    def close_request(self, request: Any) -> None:
        with self._turn:
            self._began.pop(request, None)
        super().close_request(request)

    def handle_error(self, *_: object) -> None:
        """Ignore a client that went away."""


class RunCollector(Collector):
    """Collects one run's metrics.

    Args:
        common: values of the labels that every series has.
        read: returns the current values. It is called for each scrape, from any thread.
    """

    def __init__(self, common: Mapping[str, str], read: Callable[[], Samples]) -> None:
        self.common, self.read = list(common.values()), read

    def collect(self) -> Iterable[Family]:
        samples = self.read()
        for metric in METRICS.values():
            if metric.kind == "histogram":
                distribution = samples.distributions.get(metric.name)
                if distribution is not None:
                    yield self._histogram(metric, distribution)
            elif values := _values(samples, metric):
                kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
                family = kind(metric.name, metric.help, labels=metric.labels)
                for label, value in values.items():
                    family.add_metric([*self.common, *([label] if label else [])], value)
                yield family

    def _histogram(self, metric: Metric, found: Distribution) -> Family:
        family = HistogramMetricFamily(metric.name, metric.help, labels=metric.labels)
        bounds = [*map(str, map(float, found.bounds)), "+Inf"]
        counts = accumulate(map(float, found.counts))
        family.add_metric(self.common, list(zip(bounds, counts, strict=True)), found.sum)
        return family


def _values(samples: Samples, metric: Metric) -> dict[str, float]:
    return {label: value for (name, label), value in samples.values.items() if name == metric.name}


POLL_SECONDS = 1.0


class PrometheusSink(Background):
    """Serves a run's metrics until it is closed, and then until Prometheus has the final ones.

    `close` waits for the last scrape, at most `observability.prometheus_linger_seconds`. A run that
    was stopped or preempted waits for nothing: whoever continues it serves the same metrics.

    Args:
        config: the run's configuration, with a port.
        workspace: the run's workspace.
        poll_seconds: how often to look for new events, and for a port that was in use.
    """

    def __init__(
        self, config: RunConfig, workspace: Workspace, *, poll_seconds: float = POLL_SECONDS
    ) -> None:
        self.config = config
        self._metrics: LiveMetrics | None = None
        self._endpoint: Endpoint | None = None
        self._was_busy = False
        self._linger = config.observability.prometheus_linger_seconds
        super().__init__(
            "prometheus",
            workspace,
            every=poll_seconds,
            close_seconds=self._linger + CLOSE_SECONDS,
        )

    def work(self) -> None:
        """Read the new events, and serve."""
        metrics = self._read()
        # Not before: an endpoint without all events would serve counters that are too low.
        self._open(metrics)

    def finish(self) -> None:
        """Wait until Prometheus has the final values, if nobody will serve them again."""
        metrics = self._read()
        self._open(metrics)
        if self._endpoint is not None and metrics.has_ended:
            self._endpoint.wait_for_scrape(self._linger)

    @contextlib.contextmanager
    def guarded(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.warn(f"no metrics: {error}; training continues")
        finally:
            if self._endpoint is not None:
                self._endpoint.close()

    def _read(self) -> LiveMetrics:
        if self._metrics is None:
            self._metrics = LiveMetrics(self.config, self.workspace)
        self._metrics.read()
        return self._metrics

    def _open(self, metrics: LiveMetrics) -> None:
        """Start to serve, unless the port is in use; then try again later."""
        watching = self.config.observability
        port, host = watching.prometheus_port, watching.prometheus_host
        if self._endpoint is not None or port is None:
            return
        labels = (self.workspace.run_id, self.config.model_name)
        common = dict(zip(COMMON_LABELS, labels, strict=True))
        try:
            collector = RunCollector(common, metrics.samples)
            self._endpoint = Endpoint(port, collector, default_host() if host is None else host)
        except OSError as error:
            if not self._was_busy:
                self._was_busy = True
                where = "" if host is None else f", prometheus_host {host!r}"
                self.warn(
                    f"no metrics on observability.prometheus_port {port}{where}: "
                    f"{error.strerror}; "
                    "training continues, and the port is tried again"
                )
