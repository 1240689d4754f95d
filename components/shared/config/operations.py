"""What does not affect the model: how steps are split into pods, and how a run can be watched."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from steadytrain.components.shared.config.compute import Cores, Quantity
from steadytrain.components.shared.section import Section
from steadytrain.components.shared.traceparent import FORM

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
    prometheus_host: str | None = Field(
        None,
        description="Address where that port listens; empty means all addresses. None means all "
        "addresses in a pod, and 127.0.0.1 elsewhere. The metrics need no login.",
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
    traceparent: str | None = Field(
        None,
        description="The span of the caller that the run is a part of, as in W3C's header of this "
        "name. `steadytrain submit` fills it in from its variable TRACEPARENT. None means the "
        "variable of the run's first step.",
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

    @field_validator("traceparent")
    @classmethod
    def _names_a_span(cls, text: str | None) -> str | None:
        if text is not None and not FORM.fullmatch(text):
            raise ValueError(
                "must be VERSION-TRACE-SPAN-FLAGS in lowercase hexadecimal digits, such as "
                "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
            )
        return text


StepName = Literal[
    "detect-change",
    "preprocess",
    "train",
    "tune",
    "train-winner",
    "cross-validate",
    "evaluate-and-register",
    "evaluate",
    "register",
    "promote",
    "report",
]


class StepResources(Section):
    """What the pod of a step reserves on its node."""

    cpu: Cores | None = Field(None, description="CPU cores. None means the step's usual request.")
    memory: Quantity | None = Field(None, description="Memory. None means the usual request.")


class PipelineConfig(Section):
    """The shape of the DAG. It does not change what the steps do."""

    fuse: bool = Field(
        False,
        description="Run evaluate, gate, register and promote in one pod on a cluster. This starts "
        "fewer pods, but a failure repeats all of these steps.",
    )
    resources: dict[StepName, StepResources] = Field(
        default={},
        description="What the pods of steps on a cluster reserve, by step, such as train: {cpu: "
        "500m, memory: 2Gi}. The training pods are in compute.pods. Steps that are not named "
        "reserve what the smallest run needs. `steadytrain compile` always uses that.",
    )
