"""The process of a rank, whatever it trains with: requests, errors, exit status, and the result."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from steadytrain.components.shared.environment import TRACEPARENT
from steadytrain.components.shared.output_log import redact_output
from steadytrain.components.shared.periodic import Periodic
from steadytrain.components.shared.processes import set_title
from steadytrain.components.shared.redaction import traceback_of
from steadytrain.components.shared.stopping import die_with_parent
from steadytrain.components.shared.storage.local import Awaited
from steadytrain.components.train.agent.processes import answer_to_signal
from steadytrain.components.train.attempt import (
    EVERY_SECONDS,
    PREEMPTED_EXIT,
    AttemptFolder,
    AttemptResult,
    AttemptSpec,
    Heartbeat,
    RankError,
)
from steadytrain.components.train.failures import Diverged
from steadytrain.components.train.loop.control import StopRequests

# The rest is imported late: torch takes seconds to import, and no signal may be lost in that time.
if TYPE_CHECKING:
    from steadytrain.components.shared.config import RunConfig
    from steadytrain.components.shared.events import EventStream
    from steadytrain.components.shared.events.types import AttemptOutcome
    from steadytrain.components.shared.records import DataRecord
    from steadytrain.components.shared.workspace import Workspace
    from steadytrain.components.train.checkpoint import CheckpointStore
    from steadytrain.components.train.checkpoint.cadence import Cadence
    from steadytrain.components.train.loop.progress import Emitter, ExportedChoice, Progress


class Ended(Protocol):
    """Training that has ended."""

    progress: Progress

    @property
    def reporter(self) -> Emitter: ...

    def best(self) -> ExportedChoice:
        """Return which model would be exported now."""

    def export(self, target: Path) -> ExportedChoice:
        """Export that model. Return which one it is."""


class RankProcess(ABC):
    """One rank of an attempt."""

    def __init__(self, folder: AttemptFolder) -> None:
        self.folder = folder
        self.number = int(os.environ.get("RANK", "0"))
        self.requests = StopRequests(folder.stop if self.number == 0 else None)
        self.heartbeat = Heartbeat(folder.heartbeat(self.number))

    @abstractmethod
    def run(self) -> AttemptOutcome:
        """Train according to the attempt's specification. Rank 0 writes the result."""

    @property
    @abstractmethod
    def step(self) -> int:
        """Optimizer steps done."""

    @cached_property
    def spec(self) -> AttemptSpec:
        return AttemptSpec.load(self.folder.spec)

    @cached_property
    def config(self) -> RunConfig:
        from steadytrain.components.shared.config import load

        return load(Path(self.spec.config))

    @cached_property
    def data(self) -> DataRecord:
        from steadytrain.components.shared.records import DataRecord

        return DataRecord.load(Path(self.spec.data))

    @cached_property
    def workspace(self) -> Workspace:
        from steadytrain.components.shared.workspace import Workspace

        return Workspace.of(self.config)

    def open_stream(self) -> EventStream:
        """Return the stream of rank 0's events, which the attempt's TrainJob gets too if it can."""
        from steadytrain.components.shared.events import EventStream
        from steadytrain.components.shared.events.types import Warned
        from steadytrain.components.train.loop.job_status import JobStatus, is_reported

        lines = self.workspace.lines(f"train-a{self.spec.attempt}-r0")
        if not is_reported():
            return EventStream(lines)

        def warn(message: str) -> None:
            writer = f"job-status-a{self.spec.attempt}"
            self.workspace.add_events(writer, Warned(stage="train", message=message))

        return EventStream(lines, JobStatus(warn))

    def fence(self) -> None:
        """Raise RunBusy if another supervisor took over the run."""
        from steadytrain.components.shared.lease import Generations
        from steadytrain.components.shared.storage import LocalStorage

        Generations(LocalStorage(self.workspace.lease)).fence(self.spec.generation)

    def store(self) -> CheckpointStore:
        """Open the run's checkpoints for this attempt."""
        from steadytrain.components.train.checkpoint import Lineage, open_store

        lineage = Lineage(self.spec.generation, self.spec.checkpoints)
        return open_store(self.config, self.fence, lineage)

    def cadence(self) -> Cadence | None:
        """Return when to save checkpoints by time; None if another rank says it."""
        from steadytrain.components.train.checkpoint.cadence import Cadence

        if self.number != 0:
            return None
        by_default = self.config.training.save_strategy is None
        examples = self.data.sides["train"].documents if by_default else math.inf
        return Cadence(self.spec.seconds_between_failures, self.spec.checkpoint_seconds, examples)

    def finish(
        self, training: Ended, outcome: AttemptOutcome, *, steps: int, parameters: int
    ) -> None:
        """Export the model if training has succeeded, and write the result. Only for rank 0.

        Args:
            steps: of the full training run.
        """
        from steadytrain.components.train.attempt import FINISHING

        self.fence()
        model, done = self.workspace.model, outcome in ("finished", "early_stopped")
        with beating(partial(self.heartbeat.beat, FINISHING)):
            chosen = training.export(model) if done else training.best()
            AttemptResult(
                outcome=outcome,
                step=training.progress.step,
                max_steps=steps,
                best_step=chosen.step,
                best_score=chosen.score,
                metric=chosen.metric,
                parameters=parameters,
                model=str(model) if done else "",
            ).save(self.folder.result)
            if done:
                training.reporter.finished(training.progress, outcome, chosen.step, chosen.score)
            training.reporter.close()

    def report(self, error: BaseException) -> None:
        """Write why this rank failed, and after which step."""
        error = self.cause(error)
        # A non-finite value in a checkpoint is found only after training has moved on.
        step = error.step - 1 if isinstance(error, Diverged) else self.step
        RankError.of(error, self.number, step=step, memory_needed=self.least_memory()).save(
            self.folder.error(self.number)
        )

    def cause(self, error: BaseException) -> BaseException:
        """Return what explains an error, if something is known to; otherwise the error itself."""
        return error

    def least_memory(self) -> int:
        """Return the bytes that the training needs at least; 0 if unknown."""
        return 0


def serve(folder: str, make: Callable[[AttemptFolder], RankProcess]) -> int:
    """Run a rank. Return its exit status.

    0 if training ended or stopped on request, 143 if it left on SIGTERM, 1 if it failed
    (rank-<r>.error.json has the reason).
    """
    die_with_parent()
    redact_output()
    attempt = AttemptFolder(Path(folder))
    answer_to_signal(attempt.stacks(int(os.environ.get("RANK", "0"))))
    rank = make(attempt)
    rank.requests.listen()
    try:
        set_title(f"rank {rank.number} of {rank.spec.run_id}")
        if rank.spec.traceparent:
            # For whatever a task or a component of the user's starts.
            os.environ[TRACEPARENT] = rank.spec.traceparent
        outcome = rank.run()
    except (Exception, SystemExit) as error:
        # A user's code may call sys.exit, which would look like a rank that has ended well.
        # The log may be on a full disk, as other files of the attempt need not be.
        with contextlib.suppress(OSError):
            print(traceback_of(error), end="", file=sys.stderr, flush=True)
        rank.report(error)
        return 1
    # Python restores the default handler while it exits, and the agent may send SIGTERM just then.
    # The rank would appear to die of the signal instead of exiting on its own.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return PREEMPTED_EXIT if outcome == "preempted" else 0


_LOOK_SECONDS = 0.2
_WORK_SECONDS = 0.001
"""CPU seconds since the last beat from which a thread counts as working."""


@contextlib.contextmanager
def beating(beat: Callable[[], object]) -> Iterator[None]:
    """Beat from a second thread while the calling thread is working, measured by its CPU time.

    If the calling thread hangs, for example in a write that never returns, the beats stop.
    """
    clock = time.pthread_getcpuclockid(threading.get_ident())
    before = time.clock_gettime(clock)

    def follow() -> None:
        nonlocal before
        now = time.clock_gettime(clock)
        if now - before >= _WORK_SECONDS:
            before = now
            beat()

    thread = Periodic("beating", follow, every=EVERY_SECONDS)
    try:
        yield
    finally:
        thread.end()


def wait_for_file(path: Path, beat: Callable[[], object]) -> None:
    """Beat until a file exists."""
    awaited = Awaited(path)
    while True:
        # Storage that cannot be read now is looked at again.
        with contextlib.suppress(OSError):
            if awaited.there():
                return
        beat()
        time.sleep(_LOOK_SECONDS)
