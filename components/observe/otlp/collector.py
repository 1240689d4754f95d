"""The connection to a collector: OpenTelemetry's exporters, and an error if one has no success."""

from __future__ import annotations

import logging
import os
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.errors import TrackingError
from steadytrain.components.shared.tracking.connect import shown

if TYPE_CHECKING:
    from collections.abc import Sequence

    from opentelemetry.sdk.metrics.export import MetricsData
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope

ENDPOINT: Final = "OTEL_EXPORTER_OTLP_ENDPOINT"
TIMEOUT_SECONDS: Final = 5.0
"""Longest wait for an answer, with the exporter's own retries."""
LONGEST_SECONDS: Final = 2 * TIMEOUT_SECONDS
"""Longest time for all of it, also if the answer comes byte by byte."""
_KEEP: Final = frozenset({401, 403, 404, 429, 502, 503, 504})
"""Statuses after which a batch is sent again: those that OTLP says may be retried, and those that
come from a wrong address or login, which no batch would pass."""

_DEFAULT: Final = "http://localhost:4318"
_SERVICE: Final = "steadytrain"


class Rejected(TrackingError):
    """The collector will never accept a batch."""


class Collector:
    """Sends to the collector of a configuration.

    The exporters read the other variables of OpenTelemetry themselves: headers, certificates,
    compression.

    Raises:
        Rejected: from each method, if the collector will never accept it.
        TrackingError: from each method, if the collector does not accept it now.
    """

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self._status = 0
        # It would print each refusal; the sink reports the first one.
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)

    @property
    def address(self) -> str:
        """The collector's address, without credentials."""
        stated = self.config.observability.otlp_endpoint or os.environ.get(ENDPOINT)
        return shown(stated or _DEFAULT)

    def send_spans(self, spans: Sequence[ReadableSpan]) -> None:
        """Send spans and wait for the answer."""
        self._send(self._span_exporter, spans, f"{len(spans)} spans")

    def send_metrics(self, metrics: MetricsData) -> None:
        """Send metrics and wait for the answer."""
        self._send(self._metric_exporter, metrics, "metrics")

    @cached_property
    def resource(self) -> Resource:
        """What every span and metric is about."""
        from opentelemetry.sdk.resources import Resource

        names = {"run": self.config.run_id, "model": self.config.model_name}
        return Resource.create(
            {"service.name": _SERVICE} | {f"steadytrain.{key}": name for key, name in names.items()}
        )

    @cached_property
    def scope(self) -> InstrumentationScope:
        """Who measured."""
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope

        return InstrumentationScope(_SERVICE)

    @cached_property
    def _span_exporter(self) -> Any:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        address, session = self._endpoint("traces"), self._session()
        return OTLPSpanExporter(address, timeout=TIMEOUT_SECONDS, session=session)

    @cached_property
    def _metric_exporter(self) -> Any:
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter

        address, session = self._endpoint("metrics"), self._session()
        return OTLPMetricExporter(address, timeout=TIMEOUT_SECONDS, session=session)

    def _session(self) -> Any:
        """Return a session that notes the status of each answer, which exporters do not return."""
        from steadytrain.components.shared.http_client import session

        def note(answer: Any, *_: object, **__: object) -> None:
            self._status = answer.status_code

        made = session()
        # Another address may take everything and keep nothing. Some exporters follow redirects.
        made.max_redirects = 0
        made.hooks["response"].append(note)
        return made

    def _endpoint(self, signal: str) -> str | None:
        """Return the address for a signal; None leaves it to OpenTelemetry's variables."""
        stated = self.config.observability.otlp_endpoint
        return f"{stated.rstrip('/')}/v1/{signal}" if stated else None

    def _send(self, exporter: Any, items: object, what: str) -> None:
        from steadytrain.components.shared.http_client import deadline

        self._status = 0
        with deadline(LONGEST_SECONDS):
            done = exporter.export(items).name == "SUCCESS"
        if done and 200 <= self._status < 300:
            return
        if 300 <= self._status < 400:
            raise TrackingError(
                f"the OpenTelemetry collector {self.address} redirects what it is sent to another "
                f"address (HTTP {self._status})",
                remedy=f"give the address that accepts it (observability.otlp_endpoint or "
                f"{ENDPOINT})",
            )
        if self._status >= 400 and self._status not in _KEEP:
            raise Rejected(
                f"the OpenTelemetry collector {self.address} rejects {what} for good (HTTP "
                f"{self._status}); such batches are dropped",
                remedy="the collector's log has the reason",
            )
        raise TrackingError(
            f"the OpenTelemetry collector {self.address} does not accept what it is sent",
            remedy=f"start it, or fix its address (observability.otlp_endpoint or {ENDPOINT})",
        )
