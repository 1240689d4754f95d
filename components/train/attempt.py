"""The attempt's folder: the only thing that supervisor, agent and ranks share.

attempts/<n>/
  spec.json           what to run, written by the supervisor
  stop                asks the ranks to stop; its content is the outcome to report
  leave               asks the agent to end the ranks: it sends SIGTERM at once, and SIGKILL
                      after the number of seconds in this file
  result.json         written by rank 0 when the attempt ends on its own
  rank-<r>.heartbeat  signs of life from the training thread
  rank-<r>.error.json why a rank failed (exception class, message, traceback)
  rank-<r>.stacks     stacks of a rank's threads when the rank hung
  rank-<r>.log        a rank's standard output and error
  node-<n>/           the agent's files, one folder per node:
    heartbeat         its signs of life
    exits.json        how each rank ended, written when all ranks of the node are down
    error.json        why a rank failed, if the rank itself cannot report it
    log               the agent's standard output and error
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from steadytrain.components.shared.batch import BatchSettings
from steadytrain.components.shared.config.fields import Decision
from steadytrain.components.shared.events.types import AttemptOutcome
from steadytrain.components.shared.records import Record
from steadytrain.components.shared.redaction import printable, redact, traceback_of

_BUILT_IN = (Exception, BaseException, object)
_LONGEST_TEXT = 20_000  # Characters. User code may put a whole batch into a message.

PREEMPTED_EXIT = 143
"""Exit status of a rank that left on SIGTERM; container runtimes report the same number."""


class AttemptSpec(Record):
    """What the ranks of one attempt run.

    config, data: absolute paths of the run's config.yaml and of the DataRecord.
    nodes: number of nodes that the ranks are spread over.
    pending_seconds: limit of the time that its pods may wait for nodes; None means the configured
        one.
    on_demand: whether the attempt avoids nodes that can be preempted.
    resume_from: folder of a checkpoint, or "" to start at step 0.
    skipped_batches: global batches to skip, by their position in the order.
    learning_rate_scale: factor applied to every rate of the schedule.
    rates: what a person set the schedule's peak to, as (step after which it counts, rate). They
        replace the configured rate and the factor; of two that apply, the last one counts.
    recipe: the decisions that determine what is learned, as an earlier attempt made them. Empty
        means not decided yet: they depend on the model's size, which only the ranks know.
    seconds_between_failures: expected mean; determines how often a checkpoint is saved.
    checkpoint_seconds: what the run's newest checkpoint cost, as (blocking, writing) seconds. None
        before the first one.
    generation: generation of the supervisor's lease. Once a higher one exists, this attempt may no
        longer write to the run.
    checkpoints: labels of the checkpoints that existed when the supervisor took over the run. None
        means unknown.
    until: optimizer steps after which all ranks stop as pruned; None means there is no cut.
    traceparent: TRACEPARENT of the ranks; "" leaves theirs as it is.
    """

    attempt: int
    run_id: str
    config: str
    data: str
    batch: BatchSettings
    gradient_accumulation_steps: int
    nodes: int = 1
    pending_seconds: float | None = None
    on_demand: bool = False
    resume_from: str = ""
    skipped_batches: tuple[int, ...] = ()
    learning_rate_scale: float = 1.0
    rates: tuple[tuple[int, float], ...] = ()
    recipe: tuple[Decision, ...] = ()
    seconds_between_failures: float = 14_400.0
    checkpoint_seconds: tuple[float, float] | None = None
    generation: int = 0
    checkpoints: list[str] | None = None
    until: int | None = None
    traceparent: str = ""

    def peak(self, step: int, configured: float) -> float:
        """Return the schedule's peak for the step that follows `step` finished ones."""
        return peak_of(self.rates, step, configured * self.learning_rate_scale)


def peak_of(rates: Sequence[tuple[int, float]], step: int, otherwise: float) -> float:
    """Return the last rate that counts after a step, or else another one."""
    return next((rate for start, rate in reversed(rates) if start <= step), otherwise)


class AttemptResult(Record):
    """How an attempt ended, as rank 0 reports it.

    model: folder of the exported model; "" if the attempt did not finish.
    """

    outcome: AttemptOutcome
    step: int
    max_steps: int
    best_step: int
    best_score: float
    metric: str
    parameters: int
    model: str = ""


class Exits(Record):
    """How the ranks of a node ended.

    time: when the last of them was down.
    statuses: exit status by rank (negative: a signal), the earliest failure first.
    """

    time: float
    statuses: dict[int, int]


class RankError(Record):
    """Why a rank failed.

    kind: name of the exception's class.
    names: names of its base classes, then those of the exceptions that it was raised from.
    memory_needed: minimum number of bytes that its training needs, by a formula; 0 if unknown.
    still_since: time of a hanging rank's last sign of progress; 0 otherwise.
    """

    rank: int
    time: float
    kind: str
    message: str
    traceback: str
    step: int
    names: tuple[str, ...] = ()
    memory_needed: int = 0
    still_since: float = 0.0

    @classmethod
    def of(
        cls, error: BaseException, rank: int, *, step: int = 0, memory_needed: int = 0
    ) -> RankError:
        """Return the report of an exception that ends a rank now, without secrets.

        User code may raise anything, so its text is cut to a length that every reader can hold.
        """
        name, *more = names_of(error)
        return cls(
            rank=rank,
            time=time.time(),
            kind=name,
            names=tuple(more),
            message=_limited(_text_of(error)),
            traceback=_limited(traceback_of(error)),
            step=step,
            memory_needed=memory_needed,
        )


def names_of(error: BaseException) -> list[str]:
    """Return the names of an exception's class and base classes, then those of its causes.

    The exceptions in a group are causes of it.
    """
    found, seen, waiting = list[str](), set[int](), [error]
    while waiting:
        one = waiting.pop(0)
        if id(one) in seen:
            continue
        seen.add(id(one))
        found += [item.__name__ for item in type(one).__mro__ if item not in _BUILT_IN]
        waiting += one.exceptions if isinstance(one, BaseExceptionGroup) else ()
        waiting += [one.__cause__] if one.__cause__ is not None else []
    return found


def _text_of(error: BaseException) -> str:
    """Return an exception's text, with those of the exceptions in a group."""
    try:
        text = str(error)
    except Exception as failed:
        return f"its text is unknown, because its __str__ raised {type(failed).__name__}"
    if isinstance(error, BaseExceptionGroup):
        inner = [f"{type(one).__name__}: {_text_of(one)}" for one in error.exceptions]
        text = f"{text}: {'; '.join(inner)}"
    return text


def _limited(text: str) -> str:
    """Return a text without secrets that a record can hold: its beginning and its end."""
    text, half = printable(redact(text)), _LONGEST_TEXT // 2
    left_out = len(text) - _LONGEST_TEXT
    if left_out <= 0:
        return text
    return f"{text[:half]}\n[{left_out:,} characters left out]\n{text[-half:]}"


@dataclass(frozen=True)
class NodeFolder:
    """The files of an attempt's agent on one node."""

    path: Path

    @property
    def heartbeat(self) -> Path:
        return self.path / "heartbeat"

    @property
    def exits(self) -> Path:
        return self.path / "exits.json"

    @property
    def error(self) -> Path:
        return self.path / "error.json"

    @property
    def log(self) -> Path:
        return self.path / "log"


LOGS: Final = "rank-*.log"
"""The names of the logs of an attempt's ranks."""


@dataclass(frozen=True)
class AttemptFolder:
    """The files of one attempt."""

    path: Path

    @property
    def spec(self) -> Path:
        return self.path / "spec.json"

    @property
    def stop(self) -> Path:
        return self.path / "stop"

    @property
    def leave(self) -> Path:
        return self.path / "leave"

    @property
    def result(self) -> Path:
        return self.path / "result.json"

    def node(self, number: int) -> NodeFolder:
        return NodeFolder(self.path / f"node-{number}")

    def heartbeat(self, rank: int) -> Path:
        return self.path / f"rank-{rank}.heartbeat"

    def stacks(self, rank: int) -> Path:
        return self.path / f"rank-{rank}.stacks"

    def error(self, rank: int) -> Path:
        return self.path / f"rank-{rank}.error.json"

    def log(self, rank: int) -> Path:
        return self.path / LOGS.replace("*", str(rank))

    def errors(self) -> list[RankError]:
        """Return the reported errors, the earliest first. Later ones are often its consequences."""
        paths = [*self.path.glob("rank-*.error.json"), *self.path.glob("node-*/error.json")]
        found = [RankError.load(path) for path in paths]
        return sorted(found, key=lambda error: error.time)
