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

_DEFAULT: Final = "http://localhost:4318"
_SERVICE: Final = "steadytrain"


class Collector:
    """Sends to the collector of a configuration.

    The exporters read the other variables of OpenTelemetry themselves: headers, certificates,
    compression.

    Raises:
        TrackingError: from each method, if the collector does not accept what it is sent.
    """

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        # It would print each refusal; the sink reports the first one.
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)

    @property
    def address(self) -> str:
        """The collector's address, without credentials."""
        stated = self.config.observability.otlp_endpoint or os.environ.get(ENDPOINT)
        return shown(stated or _DEFAULT)

    def send_spans(self, spans: Sequence[ReadableSpan]) -> None:
        """Send spans and wait for the answer."""
        self._check(self._span_exporter.export(spans))

    def send_metrics(self, metrics: MetricsData) -> None:
        """Send metrics and wait for the answer."""
        self._check(self._metric_exporter.export(metrics))

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

        return OTLPSpanExporter(self._endpoint("traces"), timeout=TIMEOUT_SECONDS)

    @cached_property
    def _metric_exporter(self) -> Any:
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter

        return OTLPMetricExporter(self._endpoint("metrics"), timeout=TIMEOUT_SECONDS)

    def _endpoint(self, signal: str) -> str | None:
        """Return the address for a signal; None leaves it to OpenTelemetry's variables."""
        stated = self.config.observability.otlp_endpoint
        return f"{stated.rstrip('/')}/v1/{signal}" if stated else None

    def _check(self, result: Any) -> None:
        if result.name != "SUCCESS":
            raise TrackingError(
                f"the OpenTelemetry collector {self.address} does not accept what it is sent",
                remedy=f"start it, or fix its address (observability.otlp_endpoint or {ENDPOINT})",
            )
