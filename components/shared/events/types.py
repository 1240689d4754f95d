"""The typed events of a run. Everything that reports on a run reads these.

Times are in seconds since the epoch, sizes in bytes, and durations in seconds.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, Literal

from steadytrain.components.shared.batch import BatchSettings

Level = Literal["info", "warn", "error", "fatal"]
_ON_REQUEST = frozenset({"Stopped", "KeyboardInterrupt", "Pruned"})
"""Errors of a step that was asked to end."""
AttemptOutcome = Literal["finished", "early_stopped", "pruned", "preempted", "failed", "stopped"]


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that happened in a run at a given time."""

    name: ClassVar[str] = ""
    level: ClassVar[Level] = "info"
    moments: ClassVar[tuple[str, ...]] = ("time",)
    """The fields that are times by the writer's clock."""

    time: float = field(default_factory=time.time)

    @property
    def severity(self) -> Level:
        """The level of this very event, where it depends on what happened."""
        return self.level


def skipped(start: float, end: float, seconds: float) -> float:
    """Return how far the clock was set forward between two events; 0 if that is unknown.

    Args:
        start: the time of the first event.
        end: the time of the second event.
        seconds: how much time really passed; 0 if unknown.
    """
    ahead = end - start - seconds
    # The events are written a moment apart, and NTP adjusts a clock by up to 0.05 %.
    return ahead if seconds and ahead > 1 + seconds / 1000 else 0.0


@dataclass(frozen=True, kw_only=True)
class StepStarted(Event):
    """A step of the pipeline started.

    environment: versions of the software that it runs with.
    pod: name of its pod in a pipeline on a cluster; "" on a machine without one.
    """

    name: ClassVar[str] = "step_started"
    stage: str
    environment: dict[str, str] = field(default_factory=dict)
    pod: str = ""


@dataclass(frozen=True, kw_only=True)
class StepFinished(Event):
    """A step of the pipeline has its outputs, from its own work or from an earlier run.

    reused_from: name of the run whose work it is; "" if it is its own.
    seconds: how long it took, however the clock was set meanwhile; 0 if unknown.
    """

    name: ClassVar[str] = "step_finished"
    stage: str
    seconds: float = 0.0
    reused: bool = False
    summary: str = ""
    reused_from: str = ""


@dataclass(frozen=True, kw_only=True)
class StepFailed(Event):
    """A step of the pipeline ended with an error or, with level info, because it was asked to.

    passing: whether the cause may be temporary, such as a server that is down. Then the exit
        handler submits the pipeline again.
    seconds: how long it took, however the clock was set meanwhile; 0 if unknown.
    """

    name: ClassVar[str] = "step_failed"
    level: ClassVar[Level] = "error"
    stage: str
    error: str
    message: str
    remedy: str = ""
    passing: bool = False
    seconds: float = 0.0

    def as_plain(self) -> dict[str, str]:
        """Return what went wrong and the fix, for programs."""
        return {name: getattr(self, name) for name in ("stage", "error", "message", "remedy")}

    @property
    def on_request(self) -> bool:
        """Whether the step was asked to end, so that nothing is wrong."""
        return self.error in _ON_REQUEST

    @property
    def severity(self) -> Level:
        return "info" if self.on_request else self.level


@dataclass(frozen=True, kw_only=True)
class WorkProgress(Event):
    """Progress of a long operation."""

    name: ClassVar[str] = "work_progress"
    stage: str
    work: str
    done: float
    total: float | None
    unit: str


@dataclass(frozen=True, kw_only=True)
class DataPrepared(Event):
    """The data of the run are prepared, by its own work or by an earlier run.

    records: number of records read, used or not.
    duplicates: number of records that were left out as duplicates, by reason.
    near_duplicate_threshold: `data.near_duplicate_threshold`; None if near duplicates were not
        searched, or if unknown.
    """

    name: ClassVar[str] = "data_prepared"
    records: int
    duplicates: dict[str, int]
    near_duplicate_threshold: float | None = None


@dataclass(frozen=True, kw_only=True)
class SupervisorStarted(Event):
    """A supervisor has taken over the run. Later writes by lower generations are invalid.

    checkpoints: labels of the checkpoints that existed; None if unknown.
    settings: the settings that the supervisor uses, as sections of the configuration in plain data;
        empty if unknown.
    """

    name: ClassVar[str] = "supervisor_started"
    generation: int
    pid: int
    host: str
    checkpoints: list[str] | None = None
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class AttemptStarted(Event):
    """The supervisor started the ranks.

    nodes: number of nodes that the ranks are divided among.
    inputs: digest of everything that determines the result (data, model, training).
    device: name of the device that the ranks compute on, "cpu" for a processor; "" if it was not
        checked.
    decisions: how the work is divided, as fields of `Decision`.
    code: where the user's code comes from, as far as known: git commit, digest of the uncommitted
        changes, image.
    """

    name: ClassVar[str] = "attempt_started"
    attempt: int
    world_size: int
    batch: BatchSettings
    gradient_accumulation_steps: int
    resumed_from_step: int | None = None
    inputs: str = ""
    device: str = ""
    nodes: int = 1
    decisions: list[dict[str, Any]] = field(default_factory=list)
    code: dict[str, str] = field(default_factory=dict)

    def changed_by(self, decision: RecoveryDecision) -> AttemptStarted:
        """Return the attempt with the batch settings of a decision that it carried out itself."""
        assert decision.batch is not None
        share = self.batch.micro_batch_size * self.gradient_accumulation_steps
        accumulation = share // decision.batch.micro_batch_size
        return dataclasses.replace(
            self, batch=decision.batch, gradient_accumulation_steps=accumulation
        )


@dataclass(frozen=True, kw_only=True)
class Cause:
    """Why an attempt failed, as far as the decision after it depends on that.

    failure_class: "" if it did not fail.
    message: one line, or the text of steadytrain's own error.
    remedy: what to do.
    still_since: when a hung rank last made progress; 0 if no rank hung.
    failed_step: the step in which it failed; 0 if unknown.
    unexplained: a rank was killed from outside, and nothing shows why.
    memory_needed: minimum number of bytes that a rank needs, by a formula; 0 if unknown.
    """

    failure_class: str = ""
    message: str = ""
    remedy: str = ""
    still_since: float = 0.0
    failed_step: int = 0
    unexplained: bool = False
    memory_needed: int = 0


@dataclass(frozen=True, kw_only=True)
class AttemptEnded(Cause, Event):
    """All ranks of an attempt have stopped.

    If the supervisor died, a later supervisor writes this event, with the time of the last sign of
    life.

    seconds: how long it took, however the clock was set meanwhile; 0 if its supervisor died.
    waited_seconds: how long its pods waited for nodes, quota and images; all of the attempt if one
        of them never started. That is no training time.
    """

    name: ClassVar[str] = "attempt_ended"
    moments: ClassVar[tuple[str, ...]] = ("time", "still_since")
    attempt: int
    outcome: AttemptOutcome
    step: int
    seconds: float = 0.0
    waited_seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class PodWaited(Event):
    """The pod of a node has started, or was lost before it could.

    Times are the cluster's, in full seconds; 0 for what has not happened.

    created: when its job was created.
    admitted: when its queue or quota let the job have pods.
    scheduled: when it got a machine.
    started: when its container ran, after the image was pulled.
    """

    name: ClassVar[str] = "pod_waited"
    attempt: int
    node: int
    created: float
    admitted: float
    scheduled: float
    started: float


@dataclass(frozen=True, kw_only=True)
class PodsPending(Event):
    """The pods of an attempt wait for a new reason, or none of them waits any more.

    job: name of the job that they belong to.
    reason: what the cluster says they wait for; "" once all of them have started.
    """

    name: ClassVar[str] = "pods_pending"
    level: ClassVar[Level] = "warn"
    stage: ClassVar[str] = "train"
    attempt: int
    job: str
    reason: str

    @property
    def message(self) -> str:
        """The same in words."""
        if self.reason:
            return f"{self.job} waits: {self.reason}"
        return f"{self.job} waits no more: its pods have started"


@dataclass(frozen=True)
class RecoveryDecision:
    """What happens after a failure.

    action: retry, retry_changed or stop, which the supervisor decides after a failed attempt;
        repeat_step if a rank repeats a step within the attempt; planned or learned before the first
        attempt.
    reason: one sentence for people.
    delay_seconds: wait before the retry.
    batch: the limits of all later attempts; None if the decision sets none. The global batch stays
        the same.
    fallback: the OOM fallback, if the decision is to use one.
    skipped_batch: a global batch that is skipped from now on, by its position in the order.
    learning_rate_scale: factor on the scheduled learning rates from now on, multiplied with earlier
        factors.
    nodes: number of nodes for later attempts, if some were unavailable or are tried again.
    on_demand: whether the next attempt avoids preemptible nodes.
    """

    action: str
    reason: str
    delay_seconds: float = 0.0
    batch: BatchSettings | None = None
    fallback: str = ""
    skipped_batch: int | None = None
    learning_rate_scale: float = 1.0
    nodes: int | None = None
    on_demand: bool = False

    @property
    def in_place(self) -> bool:
        """Whether the attempt continues, with the settings of `batch`."""
        return self.action == "repeat_step"


@dataclass(frozen=True, kw_only=True)
class DecisionMade(RecoveryDecision, Event):
    """The supervisor decided what to do after a failed attempt, or a rank repeats a step.

    attempt: the attempt that failed, or repeats a step; 0 for a decision that comes from an earlier
        run.
    """

    name: ClassVar[str] = "decision_made"
    attempt: int
    failure_class: str

    @property
    def severity(self) -> Level:
        return "warn" if self.in_place else self.level

    @classmethod
    def after(cls, attempt: int, cause: Cause, decision: RecoveryDecision) -> DecisionMade:
        """Return the event for the decision after a failed attempt."""
        return cls(attempt=attempt, failure_class=cause.failure_class, **vars(decision))


@dataclass(frozen=True, kw_only=True)
class Adjusted(Event):
    """A person changed a setting of the run on purpose, with `steadytrain adjust`.

    attempt: the first attempt that knows the change.
    step: the optimizer step after which it counts.
    value: of the field, as in the configuration.
    before, after: the values; of the learning rate, peaks of its schedule, after
        `training.lr_scaling` and what recovery changed. `before` is None if none was set, or if the
        rate was not known yet.
    request: id of the request.
    """

    name: ClassVar[str] = "adjusted"
    attempt: int
    step: int
    field: str
    value: int | float
    before: int | float | None
    after: int | float
    request: str

    @property
    def change(self) -> str:
        """The change in words."""
        old = "" if self.before is None else f"{self.before:.4g} -> "
        return f"{self.field} {old}{self.after:.4g} after step {self.step:,}"


def newest_attempt(events: Iterable[Event]) -> AttemptStarted | None:
    """Return the newest attempt, with the batch settings that it uses by now."""
    newest: AttemptStarted | None = None
    for event in events:
        if isinstance(event, AttemptStarted):
            newest = event
        elif isinstance(event, DecisionMade) and event.in_place:
            newest = newest.changed_by(event) if newest else None
    return newest


@dataclass(frozen=True, kw_only=True)
class TrainingStarted(Event):
    """The ranks are ready for their first step.

    recipe: the settings that affect what the model learns, as fields of `Decision`.
    groups: the parameter groups, as fields of `Group`; empty if all parameters are trained alike.
    joined: when the ranks had found each other, before they built the model; 0 if unknown.
    environment: versions of Python, the system and the packages of rank 0, by name.
    """

    name: ClassVar[str] = "training_started"
    moments: ClassVar[tuple[str, ...]] = ("time", "joined")
    attempt: int
    step: int
    max_steps: int
    parameters: int
    device: str
    precision: str
    recipe: list[dict[str, Any]] = field(default_factory=list)
    groups: list[dict[str, Any]] = field(default_factory=list)
    joined: float = 0.0
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class LatencyMeasured(Event):
    """The time that the exported model takes for one sequence.

    milliseconds: median of several forward passes with random weights.
    sequence_length: tokens of the sequence.
    device: the device that the run trains on.
    """

    name: ClassVar[str] = "latency_measured"
    attempt: int
    milliseconds: float
    sequence_length: int
    device: str


@dataclass(frozen=True, kw_only=True)
class TrainingStep(Event):
    """An optimizer step, reported every `logging_steps`.

    loss: mean over the target tokens (or examples) of the steps since the last such event.
    grad_norm: global L2 norm of this step's gradients, before clipping.
    tokens: tokens processed since the attempt started, without padding.
    gpu_memory_used: bytes allocated on this rank's device; 0 on a CPU.
    gpu_memory_reserved: bytes that torch holds on the device, allocated or not; 0 on a CPU.
    gpu_memory_peak: most bytes allocated since the attempt started, or since it halved its
        micro-batch; 0 on a CPU.
    gpu_memory_retries: how often in the attempt an allocation succeeded only after torch had
        emptied its cache.
    gpu_utilization: share of the driver's last sample period in which the device was busy, 0 to 1.
        None if the driver does not say it.
    memory_used: resident bytes of rank 0's process.
    padding: share of token positions filled with padding in the steps since the last such event.
    data_wait: share of the time of those steps in which rank 0 waited for data.
    communication_wait: share of the time of those steps in which a rank only waited for the other
        ranks and for data exchange with them: before the step, and from its last gradient until it
        has the gradient sums of all ranks. Mean over the ranks. None with one rank, and with FSDP
        or ZeRO, whose ranks exchange data throughout the step.
    slowest_rank: the rank that waited least for the others in those steps. None if
        `communication_wait` is.
    slowest_rank_wait: share of the time of those steps that this rank waited.
    clipped_steps: steps of the attempt so far whose gradients `training.max_grad_norm` clipped.
    forward, backward, optimizer: shares of the time of those steps that rank 0 spent in forward
        passes, in backward passes without waiting for other ranks, and on clipping and the update.
        None if they were not measured.
    """

    name: ClassVar[str] = "training_step"
    attempt: int
    step: int
    epoch: float
    loss: float
    learning_rate: float
    grad_norm: float
    tokens: int
    tokens_per_second: float
    gpu_memory_used: int
    memory_used: int
    padding: float = 0.0
    data_wait: float = 0.0
    communication_wait: float | None = None
    gpu_memory_reserved: int = 0
    gpu_memory_peak: int = 0
    gpu_memory_retries: int = 0
    clipped_steps: int = 0
    gpu_utilization: float | None = None
    slowest_rank: int | None = None
    slowest_rank_wait: float | None = None
    forward: float | None = None
    backward: float | None = None
    optimizer: float | None = None


@dataclass(frozen=True, kw_only=True)
class LayersMeasured(Event):
    """Norms of each layer at an optimizer step, with `training.monitor.layers`.

    gradient: L2 norm of the gradients of a layer, before clipping, by the layer's name.
    weight: L2 norm of its weights, before the update.
    update: estimated L2 norm of the update, from a sample of the weights.
    """

    name: ClassVar[str] = "layers_measured"
    attempt: int
    step: int
    gradient: dict[str, float]
    weight: dict[str, float]
    update: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class LayersCounted(Event):
    """Histograms of each layer at an optimizer step, with `training.monitor.histograms`.

    gradient: of the gradients of a layer, after clipping, by the layer's name: the lowest and the
        highest value, then how many values are in each of the equal intervals between them.
    weight: of its weights, after the update.
    """

    name: ClassVar[str] = "layers_counted"
    attempt: int
    step: int
    gradient: dict[str, list[float]]
    weight: dict[str, list[float]]


@dataclass(frozen=True, kw_only=True)
class NoiseScaleMeasured(Event):
    """The gradient noise scale at an optimizer step, with `training.monitor.noise_scale`.

    noise: variance of a global batch's gradient, summed over all weights; a running average.
    signal: squared norm of the true gradient; a running average of its estimates.
    critical_batch_size: the noise scale in sequences: noise / signal x the global batch size. None
        as long as the noise hides the signal.
    """

    name: ClassVar[str] = "noise_scale_measured"
    attempt: int
    step: int
    noise: float
    signal: float
    critical_batch_size: float | None


@dataclass(frozen=True, kw_only=True)
class ProblemFound(Event):
    """A rule of the diagnosis found a problem of the training run. Reported once per rule.

    attempt, step: the newest ones when it was found; 0 before training.
    rule: name of the rule.
    evidence: what was measured.
    remedy: what to do.
    """

    name: ClassVar[str] = "problem_found"
    level: ClassVar[Level] = "warn"
    attempt: int
    step: int
    rule: str
    evidence: str
    remedy: str


@dataclass(frozen=True, kw_only=True)
class RankUsage(Event):
    """What a rank uses of its machine, every 30 s.

    sample: number of this report, from 1 on in each attempt.
    memory_used: resident bytes of the rank's process.
    cores_used: processor seconds per second since the last report.
    gpu_memory_used, gpu_memory_reserved, gpu_memory_peak, gpu_memory_retries, gpu_utilization: of
        its GPU, as in `training_step`.
    """

    name: ClassVar[str] = "rank_usage"
    attempt: int
    rank: int
    sample: int
    memory_used: int
    cores_used: float
    gpu_memory_used: int = 0
    gpu_memory_reserved: int = 0
    gpu_memory_peak: int = 0
    gpu_memory_retries: int = 0
    gpu_utilization: float | None = None


@dataclass(frozen=True, kw_only=True)
class Validated(Event):
    """Scores on the validation side after an optimizer step.

    seconds: how long the validation took; 0 if it was not measured.
    """

    name: ClassVar[str] = "validated"
    attempt: int
    step: int
    epoch: float
    metrics: dict[str, float]
    best: bool
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class CheckpointSaved(Event):
    """A checkpoint is committed.

    checkpoint: its address.
    seconds: how long training waited for it.
    writing_seconds: from the snapshot to the commit, while training continued.
    waited_seconds: the last part of `writing_seconds`, in which training waited for the commit;
        included in `seconds`.
    """

    name: ClassVar[str] = "checkpoint_saved"
    attempt: int
    step: int
    checkpoint: str
    bytes: int
    seconds: float
    writing_seconds: float = 0.0
    waited_seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class CheckpointSkipped(Event):
    """A saved checkpoint cannot be used, so training starts from an older step.

    step: step of that checkpoint.
    resumed_from_step: where training starts instead; 0 for the beginning.
    reason: what is wrong with the checkpoint.
    """

    name: ClassVar[str] = "checkpoint_skipped"
    level: ClassVar[Level] = "warn"
    stage: ClassVar[str] = "train"
    attempt: int
    step: int
    resumed_from_step: int
    reason: str

    @property
    def message(self) -> str:
        """The same in words."""
        return (
            f"the checkpoint of step {self.step:,} is skipped, training starts from step "
            f"{self.resumed_from_step:,}: {self.reason}"
        )


@dataclass(frozen=True, kw_only=True)
class TrainingDiverged(Event):
    """The loss, a gradient or the training state is not finite, or the loss spiked."""

    name: ClassVar[str] = "training_diverged"
    level: ClassVar[Level] = "fatal"
    attempt: int
    step: int
    loss: float


CLIPPED_STEPS: Final = 100
"""Steps of which the share that was clipped is taken."""
CLIPPED_SHARE: Final = 0.5
"""Share of clipped steps above which clipping is "a strange way of reducing the learning rate"
(Godbole et al. 2023, Deep Learning Tuning Playbook)."""


@dataclass(frozen=True, kw_only=True)
class GradientOverflow(Event):
    """The loss scaler skipped a step, or most of the last steps were clipped.

    scale: of the loss scaler after the skipped step. None if steps were clipped.
    clipped: share of the last `steps` steps whose gradients `training.max_grad_norm` clipped. None
        if a step was skipped.
    """

    name: ClassVar[str] = "gradient_overflow"
    level: ClassVar[Level] = "warn"
    attempt: int
    step: int
    scale: float | None = None
    clipped: float | None = None
    steps: int = 0


@dataclass(frozen=True, kw_only=True)
class TrainingFinished(Event):
    """The last optimizer step is done and the model is exported.

    memory_peak: most resident bytes of rank 0's process in the attempt.
    """

    name: ClassVar[str] = "training_finished"
    attempt: int
    step: int
    outcome: AttemptOutcome
    best_step: int
    best_score: float
    memory_peak: int = 0


@dataclass(frozen=True, kw_only=True)
class Warned(Event):
    """Something that the user should know, but that does not stop the run."""

    name: ClassVar[str] = "warned"
    level: ClassVar[Level] = "warn"
    stage: str
    message: str


@dataclass(frozen=True, kw_only=True)
class BatchSplit(Event):
    """Memory ran out for a batch of rows that a model only answers, so it gets fewer at a time.

    The training micro-batch stays the same.

    work: what the model was doing, such as "scoring the training rows".
    rows, instead_of: number of rows at a time, and what it was before.
    rank: the rank whose memory ran out; 0 outside training.
    """

    name: ClassVar[str] = "batch_split"
    level: ClassVar[Level] = "warn"
    stage: str
    work: str
    rows: int
    instead_of: int
    rank: int = 0

    @property
    def message(self) -> str:
        """The same in words."""
        where = f" on rank {self.rank}" if self.stage == "train" else ""
        return (
            f"memory ran out while {self.work}{where}: {self.rows} at a time instead of "
            f"{self.instead_of}"
        )


@dataclass(frozen=True, kw_only=True)
class Resubmitted(Event):
    """A step was lost with its pod, and the pipeline was submitted again.

    kfp_run: id of the new Kubeflow Pipelines run.
    number: how many resubmissions in a row there were without a new checkpoint, including this one.
    limit: the most that are allowed in a row.
    """

    name: ClassVar[str] = "resubmitted"
    level: ClassVar[Level] = "warn"
    kfp_run: str
    number: int
    limit: int


@dataclass(frozen=True, kw_only=True)
class Terminated(Event):
    """The pipeline run that worked on this run was terminated. It is not submitted again.

    kfp_run: id of that Kubeflow Pipelines run.
    how: where it was terminated and, if known, by whom.
    """

    name: ClassVar[str] = "terminated"
    level: ClassVar[Level] = "warn"
    kfp_run: str
    how: str


Remark = Warned | BatchSplit | PodsPending | CheckpointSkipped
"""Events that every display shows as `stage: message`."""
