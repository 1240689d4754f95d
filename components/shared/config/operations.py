"""How a run recovers, how its steps are split into pods, and how it can be watched."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator

from steadytrain.components.shared.config.compute import Cores, Quantity
from steadytrain.components.shared.effects import Effect, IfSet, Seconds, Section
from steadytrain.components.shared.environment import FORM

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
    "search",
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


class RecoveryConfig(Section):
    """How a run recovers from failures, and which earlier results it reuses."""

    reuse_ttl_seconds: Seconds = Field(
        3600,
        ge=0,
        description="Maximum age in seconds of another run's step outputs that this run may reuse.",
    )
    checkpoints: str | None = Field(
        None,
        min_length=1,
        description="Folder or s3:// address for the run's checkpoints. None means the run's "
        "folder.",
    )
    seconds_between_failures: Seconds = Field(
        14_400,
        gt=0,
        description="Expected mean time between failures in seconds, used until the run has "
        "had failures of its own.",
    )
    stop_grace_seconds: Seconds = Field(
        20,
        gt=0,
        description="Seconds that ranks have to exit after SIGTERM before they get SIGKILL.",
    )
    max_failures_per_class: int = Field(
        3,
        ge=1,
        description="Failures of one class in a row without a new checkpoint that stop the run.",
    )
    max_preemptions: int | None = Field(
        None, ge=1, description="The same limit for preemptions. None means max_failures_per_class."
    )
    backoff_seconds: Seconds = Field(
        2,
        ge=0,
        description="Seconds to wait before the first retry. The wait doubles with each retry "
        "in a row.",
    )
    backoff_max_seconds: Seconds = Field(
        60, ge=0, description="Maximum wait before a retry, in seconds."
    )
    jitter: bool = Field(
        True, description="Shorten each wait by a random share of up to a quarter."
    )
    breaker_failures: int = Field(
        3,
        ge=1,
        description="Failures in a row without a new checkpoint, of any class except preemption, "
        "that open the circuit breaker.",
    )
    breaker_reset_seconds: Seconds = Field(
        120, ge=0, description="Seconds that the circuit breaker stays open before one last try."
    )
    resubmit: int = Field(
        3,
        ge=0,
        description="How many times in a row without a new checkpoint the exit handler submits "
        "the pipeline again after a step was lost with its pod. It never does so after a "
        "termination. 0 means never.",
    )
    server_wait_seconds: Annotated[Seconds, Effect.WAITING] = Field(
        300,
        ge=0,
        description="How long a step waits for a tracking server that is down, such as one that "
        "restarts, or that answers HTTP 408, 429, 500, 502, 503 or 504. After that the step fails "
        "with the server's message, and the exit handler submits the pipeline again, as often as "
        "`resubmit` says.",
    )
    on_demand_at_last: bool = Field(
        False,
        description="Run the last attempt after preemptions or lost nodes without "
        "compute.pods.spot.",
    )
    min_nodes: int | None = Field(
        None,
        ge=1,
        description="Fewest nodes to continue with when others are unavailable. The global batch "
        "stays the same, and the next restart after a checkpoint tries all nodes again. None means "
        "all nodes are required.",
    )
    min_sequence_length: Annotated[int | None, IfSet()] = Field(
        None,
        ge=2,
        description="Fewest tokens to which sequences may be shortened when memory runs out and no "
        "other fallback is left. That changes what the model learns, so None means never.",
    )
    hang_timeout_seconds: Seconds = Field(
        600,
        gt=0,
        description="Seconds without progress after which a rank counts as hung and all ranks "
        "restart. Must be longer than the longest batch or save. Collectives wait longer than "
        "this and start_timeout_seconds, so that a hang is found first.",
    )
    start_timeout_seconds: Seconds = Field(
        1800, gt=0, description="The same limit before a rank's first step and after its last one."
    )
    lease_seconds: Seconds = Field(
        60,
        gt=0,
        description="Seconds without a sign of life after which a supervisor or an agent counts "
        "as dead and may be replaced.",
    )
    spike_threshold: Annotated[float, Effect.DIVERGENCE] = Field(
        6.0,
        ge=0,
        description="Deviations above the median loss at which a step counts as diverged, if its "
        "loss also gives back half of the improvement so far. 0 means only non-finite losses "
        "count.",
    )
    spike_window: Annotated[int, Effect.DIVERGENCE] = Field(
        128,
        ge=4,
        description="Number of most recent steps used for that median. Detection starts once "
        "half of them exist.",
    )
