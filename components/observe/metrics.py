"""Every metric that steadytrain exposes, and its current values."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from steadytrain.components.sizing.hardware import known_gpu
from steadytrain.components.train.failures import FailureClass
from steadytrain.components.train.recovery.history import AttemptHistory

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
    Metric(
        "gradients_clipped",
        "counter",
        "steps",
        "Steps whose gradients training.max_grad_norm clipped; repeats count.",
    ),
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


@dataclass
class Distribution:
    """What a histogram has observed.

    counts: observations by bucket, not cumulative; the last one has no upper bound.
    """

    bounds: tuple[float, ...]
    counts: list[int] = field(init=False)
    sum: float = 0.0

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value


class Samples:
    """Values by metric and label value ("" for a metric without a label of its own).

    Methods raise KeyError for a metric that the registry does not have in that kind.
    """

    def __init__(self) -> None:
        self.values: dict[tuple[str, str], float] = {}
        self.distributions: dict[str, Distribution] = {}

    @classmethod
    def at_zero(cls) -> Samples:
        """Return all counters at 0: otherwise Prometheus does not see their first increase.

        The cost is left out, because it may be unknown.
        """
        samples = cls()
        for metric in METRICS.values():
            if metric.kind == "counter" and metric.name != "cost_usd":
                for label in metric.values or [""]:
                    samples.add(metric.name, 0.0, label)
        return samples

    def set(self, name: str, value: float, label: str = "") -> None:
        """Set a gauge."""
        self.values[_key(name, "gauge", label)] = value

    def add(self, name: str, amount: float, label: str = "") -> None:
        """Increase a counter. Negative amounts are ignored: a counter never decreases."""
        key = _key(name, "counter", label)
        self.values[key] = self.values.get(key, 0.0) + max(0.0, amount)

    def observe(self, name: str, value: float) -> None:
        """Add an observation to a histogram."""
        _key(name, "histogram", "")
        bounds = tuple(METRICS[name].buckets)
        self.distributions.setdefault(name, Distribution(bounds)).observe(value)


def _key(name: str, kind: str, label: str) -> tuple[str, str]:
    metric = METRICS[name]
    if metric.kind != kind or bool(metric.label) != bool(label):
        raise KeyError(f"{name} is a {metric.kind} with the label {metric.label!r}")
    return name, label


KEPT_SECONDS: Final = 3600.0
"""How far back the values go."""

Values = Mapping[tuple[str, str], float]


class Series:
    """Samples of the metrics in the order of time. Answers as PromQL would."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, Values]] = deque()

    def add(self, time: float, samples: Samples) -> None:
        """Add the values of a time, and forget those that are too old."""
        self._samples.append((time, samples.values))
        while self._samples[0][0] < time - KEPT_SECONDS:
            self._samples.popleft()

    @property
    def now(self) -> float:
        """The time of the newest sample."""
        return self._samples[-1][0]

    @property
    def names(self) -> set[str]:
        """The metrics that have a value now."""
        return {name for name, _ in self._samples[-1][1]}

    def value(self, name: str) -> float:
        """Return the newest value of a metric, summed over its label; NaN if there is none."""
        values = [value for (metric, _), value in self._samples[-1][1].items() if metric == name]
        return sum(values) if values else math.nan

    def mean(self, name: str, seconds: float, *, offset: float = 0.0) -> float:
        """Return the mean over a window that ended `offset` seconds ago; NaN without values."""
        values = list(self._window(name, seconds, offset))
        return sum(values) / len(values) if values else math.nan

    def increase(self, name: str, seconds: float) -> float:
        """Return by how much a counter has increased in the last seconds."""
        values = list(self._window(name, seconds, 0.0))
        return values[-1] - values[0] if values else 0.0

    def age(self, timestamp: str) -> float:
        """Return the seconds since a time, or since the attempt started if that is later."""
        started = self.value("attempt_started_timestamp_seconds")
        times = [when for when in (self.value(timestamp), started) if not math.isnan(when)]
        return self.now - max(times, default=self.now)

    def _window(self, name: str, seconds: float, offset: float) -> Iterator[float]:
        end = self.now - offset
        for time, values in self._samples:
            if end - seconds < time <= end and (name, "") in values:
                yield values[name, ""]


_PER_PARAMETER, _WITH_FROZEN_WEIGHTS = 6.0, 4.0
"""FLOPs for each parameter and token, forward and backward. Frozen weights need no gradients."""


def flops_utilization(
    attempt: AttemptHistory, tokens_per_second: float, *, adapters: bool
) -> float | None:
    """Return the share of the GPUs' peak that a speed needs; None if the peak is unknown.

    Args:
        tokens_per_second: of all ranks together.
        adapters: whether the model's own weights are frozen.
    """
    ready = attempt.ready
    gpu = known_gpu(ready.device) if ready else None
    if ready is None or gpu is None:
        return None
    peak = gpu.fp32_tflops if ready.precision == "fp32" else gpu.half_tflops
    flops = (_WITH_FROZEN_WEIGHTS if adapters else _PER_PARAMETER) * ready.parameters
    return flops * tokens_per_second / (attempt.started.world_size * peak * 1e12)
