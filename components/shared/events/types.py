"""The typed events of a run. Everything that reports on a run reads these.

Times are seconds since the epoch, sizes bytes, durations seconds.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import time
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from pydantic import TypeAdapter

Level = Literal["info", "warn", "error", "fatal"]
AttemptOutcome = Literal["finished", "early_stopped", "pruned", "preempted", "failed", "stopped"]


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that happened at a time in a run."""

    name: ClassVar[str] = ""
    level: ClassVar[Level] = "info"

    time: float = field(default_factory=time.time)


@dataclass(frozen=True, kw_only=True)
class StepStarted(Event):
    """A step of the pipeline began its work.

    environment: versions of what it runs with.
    """

    name: ClassVar[str] = "step_started"
    stage: str
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class StepFinished(Event):
    """A step of the pipeline has its outputs, from work or from an earlier run."""

    name: ClassVar[str] = "step_finished"
    stage: str
    reused: bool = False
    summary: str = ""


@dataclass(frozen=True, kw_only=True)
class StepFailed(Event):
    """A step of the pipeline ended with an error."""

    name: ClassVar[str] = "step_failed"
    level: ClassVar[Level] = "error"
    stage: str
    error: str
    message: str
    remedy: str = ""


@dataclass(frozen=True, kw_only=True)
class WorkProgress(Event):
    """How far a long piece of work is."""

    name: ClassVar[str] = "work_progress"
    stage: str
    work: str
    done: float
    total: float | None
    unit: str


@dataclass(frozen=True, kw_only=True)
class SupervisorStarted(Event):
    """A supervisor has taken the run: what those of lower generations write from now on is void.

    checkpoints: labels of those that there were; None: not told.
    settings: what it works by, sections of the configuration as plain data; empty: not told.
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

    nodes: among which the ranks are divided.
    inputs: digest of what decides the result (data, model, training).
    device: name of what the ranks compute on, "cpu" for a processor; "" where it was not looked up.
    snapshot: whether checkpoints are copied to host memory before they are written.
    strategy, offload: how the ranks share the state, and what of it the host keeps.
    decisions: how the work is cut, as fields of `Decision`.
    """

    name: ClassVar[str] = "attempt_started"
    attempt: int
    world_size: int
    micro_batch_size: int
    gradient_accumulation_steps: int
    resumed_from_step: int | None = None
    inputs: str = ""
    gradient_checkpointing: bool = False
    device: str = ""
    snapshot: bool = True
    nodes: int = 1
    strategy: str = "ddp"
    offload: str = "none"
    decisions: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class AttemptEnded(Event):
    """All ranks of an attempt are down.

    Where its supervisor died, a later one tells of it, with the time of the last sign of life.

    still_since: the last sign of progress of a rank that hung; 0 where none did.
    failed_step, unexplained, memory_needed: what else a decision goes by, as in a Failure.
    """

    name: ClassVar[str] = "attempt_ended"
    attempt: int
    outcome: AttemptOutcome
    step: int
    failure_class: str = ""
    message: str = ""
    remedy: str = ""
    still_since: float = 0.0
    failed_step: int = 0
    unexplained: bool = False
    memory_needed: int = 0


@dataclass(frozen=True, kw_only=True)
class DecisionMade(Event):
    """The supervisor decided what follows a failed attempt.

    attempt: the one that failed; 0 for what an earlier run has taught this one.
    micro_batch_size, gradient_checkpointing, snapshot, strategy, offload: what all later attempts
        are held to, where it changes.
    rung: of the ladder for running out of memory, where that was the answer.
    nodes: how many later attempts have, where some stayed away.
    skipped_batch: a global batch that is left out from then on, by its place in the order.
    learning_rate_scale: factor on the schedule's rates, from then on and beside earlier ones.
    on_demand: whether the next attempt does without nodes that may be taken away.
    """

    name: ClassVar[str] = "decision_made"
    attempt: int
    failure_class: str
    action: str
    reason: str
    delay_seconds: float = 0.0
    micro_batch_size: int | None = None
    gradient_checkpointing: bool = False
    snapshot: bool = True
    strategy: str = ""
    offload: str = "none"
    rung: str = ""
    skipped_batch: int | None = None
    learning_rate_scale: float = 1.0
    nodes: int | None = None
    on_demand: bool = False


@dataclass(frozen=True, kw_only=True)
class TrainingStarted(Event):
    """The ranks are ready to take their first step.

    recipe: what decides what is learned, as fields of `Decision`.
    """

    name: ClassVar[str] = "training_started"
    attempt: int
    step: int
    max_steps: int
    parameters: int
    device: str
    precision: str
    recipe: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class TrainingStep(Event):
    """An optimizer step, every `logging_steps`.

    loss: mean over the target tokens (or examples) of the steps since the last such event.
    grad_norm: global L2 norm before clipping, of this step.
    tokens: tokens processed since the attempt began, padding left out.
    gpu_memory_used: bytes allocated on this rank's device; 0 on a CPU.
    memory_used: resident bytes of rank 0's process.
    padding: share of the tokens' places that padding took in the steps since the last such event.
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


@dataclass(frozen=True, kw_only=True)
class Validated(Event):
    """Scores on the validation side after an optimizer step."""

    name: ClassVar[str] = "validated"
    attempt: int
    step: int
    epoch: float
    metrics: dict[str, float]
    best: bool


@dataclass(frozen=True, kw_only=True)
class CheckpointSaved(Event):
    """A checkpoint is committed.

    checkpoint: its address.
    seconds: that training waited for it.
    writing_seconds: from the snapshot to the commit, beside the training.
    waited_seconds: at the end of these, that training waited for the commit; part of `seconds`.
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
class TrainingDiverged(Event):
    """Loss or gradient norm is not finite."""

    name: ClassVar[str] = "training_diverged"
    level: ClassVar[Level] = "fatal"
    attempt: int
    step: int
    loss: float


@dataclass(frozen=True, kw_only=True)
class GradientOverflow(Event):
    """The loss scaler skipped a step."""

    name: ClassVar[str] = "gradient_overflow"
    level: ClassVar[Level] = "warn"
    attempt: int
    step: int
    scale: float


@dataclass(frozen=True, kw_only=True)
class TrainingFinished(Event):
    """The last optimizer step is done and the model is exported."""

    name: ClassVar[str] = "training_finished"
    attempt: int
    step: int
    outcome: AttemptOutcome
    best_step: int
    best_score: float


@dataclass(frozen=True, kw_only=True)
class Warned(Event):
    """Something the user should know that stops nothing."""

    name: ClassVar[str] = "warned"
    level: ClassVar[Level] = "warn"
    stage: str
    message: str


@dataclass(frozen=True, kw_only=True)
class Resubmitted(Event):
    """A step was lost with its pod, and the pipeline was submitted again.

    kfp_run: id of the new run of Kubeflow Pipelines.
    number: which one it is in a row without a new checkpoint, of `limit` at most.
    """

    name: ClassVar[str] = "resubmitted"
    level: ClassVar[Level] = "warn"
    kfp_run: str
    number: int
    limit: int


# Made once, and fields as they are: this runs between two steps of the training.
_encode = json.JSONEncoder(ensure_ascii=False).encode

LATEST = 253_402_300_799.0
"""The end of the year 9999, which no calendar function goes beyond."""
_TYPES: dict[str, type[Event]] = {kind.name: kind for kind in Event.__subclasses__()}


def to_json(event: Event, *, job_id: str) -> str:
    """One line of JSON: event, level, job_id, and the event's own fields."""
    content: dict[str, Any] = {"event": event.name, "level": event.level, "job_id": job_id}
    # Python writes NaN and Infinity, which is what a diverged loss is; readers here are Python.
    return _encode(content | vars(event))


def from_json(line: str) -> Event:
    """The event of a line.

    Raises:
        ValueError: the line is torn, names no known event, or has a field of another type.
    """
    try:
        content = json.loads(line)
    except RecursionError as error:
        raise ValueError("brackets within brackets, and no event") from error
    name = content.pop("event", "") if isinstance(content, dict) else ""
    if not isinstance(name, str) or name not in _TYPES:
        raise ValueError(f"no known event in {line[:80]!r}")
    validator, known = _validator(name)
    event = validator.validate_python({key: content[key] for key in known if key in content})
    if not 0 <= event.time <= LATEST:
        raise ValueError(f"an event at no time that can be: {event.time}")
    return event


@functools.cache
def _validator(name: str) -> tuple[TypeAdapter[Event], tuple[str, ...]]:
    """What checks the fields of an event, and their names."""
    kind = _TYPES[name]
    return TypeAdapter(kind), tuple(item.name for item in dataclasses.fields(kind))
