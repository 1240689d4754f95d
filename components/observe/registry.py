"""Every metric that steadytrain exposes.

The reference page, the Prometheus endpoint, the alert rules and the dashboards are made from this
table. Tests check every PromQL expression against it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from steadytrain.components.train.failures import FailureClass

Kind = Literal["counter", "gauge", "histogram"]

COMMON_LABELS: Final = ("run", "model")
"""Labels of every series: the run's name, and the name of its model."""


@dataclass(frozen=True)
class Metric:
    """One metric.

    unit: of its values; "" for a number without one.
    label: the label besides COMMON_LABELS, "phase" or "class"; "" if there is none.
    values: every value of that label.
    buckets: upper bounds of a histogram's buckets, in `unit`.
    """

    name: str
    kind: Kind
    unit: str
    help: str
    label: str = ""
    values: Sequence[str] = ()
    buckets: Sequence[float] = ()

    @property
    def labels(self) -> tuple[str, ...]:
        return (*COMMON_LABELS, self.label) if self.label else COMMON_LABELS

    @property
    def series(self) -> tuple[str, ...]:
        """The names by which queries find it: Prometheus adds suffixes to some kinds."""
        if self.kind == "counter":
            return (f"{self.name}_total",)
        if self.kind == "histogram":
            return (f"{self.name}_bucket", f"{self.name}_sum", f"{self.name}_count")
        return (self.name,)


_STEP_PHASES = (
    "data",
    "forward",
    "backward",
    "communication",
    "optimizer",
    "other",
    "checkpoint",
    "validation",
)
_RUN_PHASES = ("useful", "lost", "restarting", "checkpointing", "waiting")
FAILURE_CLASSES: Final = tuple(kind.value for kind in FailureClass)
INTERRUPTED: Final = "interrupted"
"""Stands for a failure class if an attempt ended without a failure of its own."""

_ALL: Final = (
    # The run.
    Metric(
        "training_duration_seconds",
        "histogram",
        "seconds",
        "Wall clock of a training run, from its first attempt to its last. Observed once, when "
        "training has finished.",
        buckets=(600, 3600, 14400, 86400),
    ),
    Metric(
        "cost_usd",
        "counter",
        "USD",
        "Cost of the attempts so far, by compute.price_per_hour. Waits cost nothing.",
    ),
    Metric("cost_budget_usd", "gauge", "USD", "The run's observability.budget_usd."),
    Metric("run_active", "gauge", "", "1 while the run trains or will try again, 0 after its end."),
    Metric("attempts", "counter", "attempts", "Attempts started."),
    Metric(
        "failures",
        "counter",
        "failures",
        "Failed attempts and repeated steps by failure class.",
        label="class",
        values=FAILURE_CLASSES,
    ),
    Metric(
        "run_seconds",
        "gauge",
        "seconds",
        "The run's wall clock by what it was spent on, as in the report. Useful time becomes lost "
        "when an attempt fails, so this is not a counter.",
        label="phase",
        values=_RUN_PHASES,
    ),
    Metric("goodput", "gauge", "share, 0 to 1", "Useful share of the run's wall clock."),
    Metric(
        "lost_seconds",
        "counter",
        "seconds",
        "Training time that had to be repeated, by the class of the failure that lost it; "
        "`interrupted` if the run was stopped from outside.",
        label="class",
        values=(*FAILURE_CLASSES, INTERRUPTED),
    ),
    Metric(
        "attempt_started_timestamp_seconds",
        "gauge",
        "seconds since 1970",
        "When the newest attempt was started.",
    ),
    Metric(
        "attempt_ready",
        "gauge",
        "",
        "1 if the ranks of the newest attempt are ready to train, 0 while they wait for a node, "
        "an image or each other.",
    ),
    # Training.
    Metric("training_loss", "gauge", "", "Mean loss of the newest reported steps."),
    Metric("learning_rate", "gauge", "", "Learning rate of the newest reported step."),
    Metric(
        "gradient_norm", "gauge", "", "Global L2 norm of the newest gradients, before clipping."
    ),
    Metric(
        "critical_batch_size",
        "gauge",
        "sequences",
        "Batch size up to which a larger global batch saves steps, by the gradient noise scale.",
    ),
    Metric("training_step", "gauge", "optimizer steps", "The newest reported step."),
    Metric("training_max_steps", "gauge", "optimizer steps", "Steps of the full training run."),
    Metric("training_epoch", "gauge", "epochs", "Passes over the training data."),
    Metric(
        "last_step_timestamp_seconds",
        "gauge",
        "seconds since 1970",
        "When a step was last reported.",
    ),
    Metric("divergences", "counter", "divergences", "How often training diverged."),
    Metric("gradient_overflows", "counter", "steps", "Steps that the loss scaler of fp16 skipped."),
    Metric("validation_loss", "gauge", "", "Loss on the validation data."),
    Metric("validation_perplexity", "gauge", "", "Perplexity on the validation data."),
    Metric("validation_accuracy", "gauge", "share, 0 to 1", "Accuracy on the validation data."),
    Metric("validation_macro_f1", "gauge", "share, 0 to 1", "Macro F1 on the validation data."),
    # Speed.
    Metric("tokens", "counter", "tokens", "Tokens trained on, without padding; repeats count."),
    Metric("tokens_per_second", "gauge", "tokens per second", "Speed of all ranks together."),
    Metric(
        "mfu",
        "gauge",
        "share, 0 to 1",
        "Model FLOPs utilization: 6 FLOPs per parameter and token (4 with adapters), relative to "
        "the data sheet of the GPU. Attention is not counted. Missing for GPUs that are not in "
        "the table.",
    ),
    Metric(
        "step_seconds",
        "counter",
        "seconds",
        "Time of training by phase: data and communication are waits, checkpoint is the time in "
        "which training stopped for one, and other is the rest of the steps, or all of it with a "
        "trainer that does not measure the passes.",
        label="phase",
        values=_STEP_PHASES,
    ),
    Metric(
        "gpu_utilization",
        "gauge",
        "share, 0 to 1",
        "Share of the last sample period in which rank 0's GPU was busy, as its driver reports it.",
    ),
    Metric("padding_ratio", "gauge", "share, 0 to 1", "Share of token positions that are padding."),
    # Memory.
    Metric("micro_batch_size", "gauge", "sequences", "Micro-batch of the newest attempt."),
    Metric("gpu_memory_allocated_bytes", "gauge", "bytes", "Allocated on rank 0's GPU."),
    Metric("gpu_memory_reserved_bytes", "gauge", "bytes", "Reserved by torch on rank 0's GPU."),
    Metric(
        "gpu_memory_peak_bytes", "gauge", "bytes", "Most allocated on rank 0's GPU in an attempt."
    ),
    Metric(
        "gpu_memory_retries",
        "counter",
        "allocations",
        "Allocations on rank 0's GPU that succeeded only after torch had emptied its cache.",
    ),
    Metric("host_memory_bytes", "gauge", "bytes", "Resident memory of rank 0's process."),
    # Checkpoints and tracking.
    Metric(
        "checkpoint_size_mb",
        "histogram",
        "MB",
        "Size of the committed checkpoints, in 10^6 bytes.",
        buckets=(10, 100, 1000, 10_000, 100_000, 1_000_000),
    ),
    Metric(
        "last_checkpoint_timestamp_seconds",
        "gauge",
        "seconds since 1970",
        "When the newest checkpoint was committed.",
    ),
    Metric(
        "sink_queue_bytes", "gauge", "bytes", "Events that MLflow lacks, as bytes of their files."
    ),
    Metric("sink_lag_seconds", "gauge", "seconds", "Age of the oldest event that MLflow lacks."),
)

METRICS: Final[Mapping[str, Metric]] = {metric.name: metric for metric in _ALL}
"""By name, in display order."""

SERIES: Final[Mapping[str, Metric]] = {name: metric for metric in _ALL for name in metric.series}
"""By the names that queries use."""

VALIDATION_PREFIX: Final = "validation_"
"""Comes before a metric that a task computes on the validation data. Metrics that the registry
does not name are not exposed: their number would have no bound."""
