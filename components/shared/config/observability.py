"""How a run can be watched. It does not change what the run does."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from steadytrain.components.shared.config.base import Section

LogFormat = Literal["json", "text"]


class ObservabilityConfig(Section):
    """Metrics and logs of a run that is training."""

    prometheus_port: int | None = Field(
        None,
        ge=1,
        le=65535,
        description="Port where the train step serves its metrics to Prometheus. None means that "
        "it serves none. manifests/components/monitoring scrapes 9464.",
    )
    prometheus_linger_seconds: float = Field(
        30.0,
        ge=0,
        le=600,
        description="How long the train step waits at its end, at most, until Prometheus has "
        "fetched the final metrics.",
    )
    budget_usd: float | None = Field(
        None,
        gt=0,
        description="Expected cost of the run. An alert reports a run that costs more; the run "
        "continues.",
    )
    otlp_endpoint: str | None = Field(
        None,
        description="Base address of the OpenTelemetry collector for the sink `otlp`, such as "
        "http://collector:4318. None means OTEL_EXPORTER_OTLP_ENDPOINT, or the collector on this "
        "machine if that is not set. Credentials go to OTEL_EXPORTER_OTLP_HEADERS.",
    )
    diagnosis: bool = Field(
        True,
        description="Whether problems of the training, such as overfitting or waiting for data, "
        "are reported as events while it runs.",
    )
    logs: Literal["auto", "json", "text"] = Field(
        "auto",
        description="Format of the log. json: one JSON object per line; text: one line of text "
        "per event; auto: json in the pods of a cluster, text elsewhere.",
    )
