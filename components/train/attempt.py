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

Programs that share nothing but storage have heartbeats: one writes, and another checks whether the
content changes. Only the observer's own clock
counts, so the machines' clocks do not have to agree.

Storage that fails for a while ends neither of them. A beat that cannot be written is left out, and
an observer that cannot read does not count the time. Beats that stay out look like a process that
is gone: without storage, nothing proves that it may go on (see the lease).
"""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pydantic import Field

from steadytrain.components.shared.batch import BatchSettings
from steadytrain.components.shared.config import RecoveryConfig, TrainingConfig
from steadytrain.components.shared.config.fields import Decision
from steadytrain.components.shared.errors import FIX
from steadytrain.components.shared.events.types import AttemptOutcome
from steadytrain.components.shared.paths import Inside
from steadytrain.components.shared.records import Record
from steadytrain.components.shared.redaction import printable, redact, traceback_of
from steadytrain.components.shared.storage.local import open_regular
from steadytrain.components.sizing.recipe import RATE

_BUILT_IN = (Exception, BaseException, object)
_LONGEST_TEXT = 20_000  # Characters. User code may put a whole batch into a message.

PREEMPTED_EXIT = 143
"""Exit status of a rank that left on SIGTERM; container runtimes report the same number."""


Change = tuple[int, str, int | float]


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
    changes: what a person changed, as (step after which it counts, field of the configuration,
        value); of two that apply to a field, the last one counts. A learning rate is the schedule's
        peak, which replaces the configured one and the factor.
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
    changes: tuple[Change, ...] = ()
    recipe: tuple[Decision, ...] = ()
    seconds_between_failures: float = 14_400.0
    checkpoint_seconds: tuple[float, float] | None = None
    generation: int = 0
    checkpoints: list[str] | None = None
    until: int | None = None
    traceparent: str = ""

    def peak(self, step: int, configured: float) -> float:
        """Return the schedule's peak for the step that follows `step` finished ones."""
        return peak_of(self.changes, step, configured * self.learning_rate_scale)


def peak_of(changes: Sequence[Change], step: int, otherwise: float) -> float:
    """Return the last learning rate that counts after a step, or else another one."""
    rates = (value for start, field, value in reversed(changes) if field == RATE and start <= step)
    return next(rates, otherwise)


def changed(training: TrainingConfig, changes: Sequence[Change], step: int) -> TrainingConfig:
    """Return the settings for the step that follows `step` finished ones.

    Args:
        changes: of fields of `training`, as in AttemptSpec. The learning rate stays the configured
            one, since the schedule has the other.
    """
    counting = {field: value for start, field, value in changes if start <= step and field != RATE}
    return training.model_copy(
        update={field.removeprefix("training."): value for field, value in counting.items()}
    )


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
    remedy: the fix of this package's own errors, whose message is sufficient; "" for others.
    names: names of its base classes, then those of the exceptions that it was raised from.
    memory_needed: minimum number of bytes that its training needs, by a formula; 0 if unknown.
    still_since: time of a hanging rank's last sign of progress; 0 otherwise.
    """

    rank: int = 0
    time: float = Field(default_factory=time.time)
    kind: str
    message: str
    remedy: str = ""
    traceback: str = ""
    step: int = 0
    names: tuple[str, ...] = ()
    memory_needed: int = 0
    still_since: float = 0.0

    @classmethod
    def of(
        cls, error: BaseException, rank: int = 0, *, step: int = 0, memory_needed: int = 0
    ) -> RankError:
        """Return the report of an exception that ends a rank now, without secrets.

        User code may raise anything, so its text is cut to a length that every reader can hold.
        """
        name, *more = names_of(error)
        message, _, remedy = _text_of(error).partition(FIX)
        return cls(
            rank=rank,
            kind=name,
            names=tuple(more),
            message=_limited(message),
            remedy=_limited(remedy),
            traceback=_limited(traceback_of(error)),
            step=step,
            memory_needed=memory_needed,
        )


def names_of(error: BaseException) -> list[str]:
    """Return the names of an exception's class and base classes, then those of its causes.

    The exceptions in a group are causes of it.
    """
    result, seen, waiting = list[str](), set[int](), [error]
    while waiting:
        one = waiting.pop(0)
        if id(one) in seen:
            continue
        seen.add(id(one))
        result += [item.__name__ for item in type(one).__mro__ if item not in _BUILT_IN]
        waiting += one.exceptions if isinstance(one, BaseExceptionGroup) else ()
        waiting += [one.__cause__] if one.__cause__ is not None else []
    return result


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

    heartbeat = Inside("path", "heartbeat")
    exits = Inside("path", "exits.json")
    error = Inside("path", "error.json")
    log = Inside("path", "log")


LOGS: Final = "rank-*.log"
"""The names of the logs of an attempt's ranks."""


@dataclass(frozen=True)
class AttemptFolder:
    """The files of one attempt."""

    path: Path

    spec = Inside("path", "spec.json")
    stop = Inside("path", "stop")
    leave = Inside("path", "leave")
    result = Inside("path", "result.json")

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
        result = [RankError.load(path) for path in paths]
        return sorted(result, key=lambda error: error.time)


EVERY_SECONDS = 1.0
STARTING, FINISHING = "start", "finish"
"""The phases before a rank's first step and after its last one."""
MEETING = "meet"
"""The phase in which a rank waits for the others."""
_WIDTH = 64
_WRITE: Final = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK
"""Opening a pipe fails at once instead of waiting for its reader."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Beat:
    """Content of a heartbeat: process ID, beat count, step, and phase."""

    pid: int
    count: int
    step: int
    phase: str

    @classmethod
    def read(cls, path: Path) -> Beat | None:
        """Return the last beat, or None if there is none: no file, or something else in its place.

        Raises:
            OSError: it cannot be read now.
        """
        try:
            with open_regular(path) as file:
                pid, count, step, phase = file.read(_WIDTH).decode().split()
            return cls(int(pid), int(count), int(step), phase)
        except (FileNotFoundError, IsADirectoryError, ValueError):
            return None
        except OSError as error:
            if error.errno == errno.ENXIO:
                return None
            raise


class Heartbeat:
    """Writes a process's signs of life to a file, at most once per second.

    The thread that does the work calls `beat`, so the heartbeat stops if that thread hangs.

    Attributes:
        refusal: why the last beat could not be written; "" if it was.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.count = 0
        self.phase, self.step = "", 0
        self.last = float("-inf")
        self.path, self.refusal = path, ""
        self._descriptor: int | None = None
        self.beat(STARTING)

    def beat(self, phase: str, step: int | None = None) -> None:
        """Record progress. A new phase is written immediately."""
        now = self.clock()
        if now - self.last < EVERY_SECONDS and phase == self.phase:
            return
        self.step = self.step if step is None else step
        self.last, self.count, self.phase = now, self.count + 1, phase
        line = f"{os.getpid()} {self.count} {self.step} {self.phase}\n"
        try:
            self._write(line.ljust(_WIDTH).encode())
        except OSError as error:
            self._report(error.strerror or repr(error))
        else:
            self._report("")

    def close(self) -> None:
        """Close the file. A later beat opens it again."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _write(self, line: bytes) -> None:
        if self._descriptor is None:
            self._descriptor = os.open(self.path, _WRITE, 0o644)
        try:
            # One small in-place write is never seen half-written, and avoids a rename every second.
            os.pwrite(self._descriptor, line, 0)
        except OSError:
            # A stale handle never works again.
            self.close()
            raise

    def _report(self, refusal: str) -> None:
        """Report a change, once. Logging does not fail on the same storage."""
        if refusal != self.refusal:
            report = (
                f"cannot be written: {refusal}; it tries again" if refusal else "is written again"
            )
            _log.warning("the heartbeat %s %s", self.path, report)
        self.refusal = refusal


OTHER_RANKS_SECONDS: Final = 900.0
"""How long a rank that waits for the others' parts of a save shows signs of life."""
_SLACK_SECONDS: Final = 300.0
"""Time to find a hang, to save the stacks, and to end the ranks."""


def longest_wait(recovery: RecoveryConfig) -> float:
    """Return the seconds after which a collective may fail by itself.

    A rank that does not come is found before that by its heartbeat, and reported with its stacks.
    """
    limit = max(recovery.start_timeout_seconds, recovery.hang_timeout_seconds)
    return OTHER_RANKS_SECONDS + limit + _SLACK_SECONDS
