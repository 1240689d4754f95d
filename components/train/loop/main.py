"""A rank: `python -m steadytrain.components.train.loop.main ATTEMPT_FOLDER`.

Runs alone or under torchrun. Exit status: 0 if training ended or stopped on request, 143 if it left
on SIGTERM, 1 if it failed (rank-<r>.error.json has the reason).
"""

from __future__ import annotations

import os
import signal
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from steadytrain.components.shared.config.secrets import redact
from steadytrain.components.shared.errors import DataError
from steadytrain.components.shared.lifeline import die_with_parent
from steadytrain.components.shared.redaction import traceback_of
from steadytrain.components.train.agent.stacks import answer_to_signal
from steadytrain.components.train.attempt import (
    PREEMPTED_EXIT,
    AttemptFolder,
    AttemptResult,
    AttemptSpec,
    RankError,
)
from steadytrain.components.train.errors import Diverged
from steadytrain.components.train.heartbeat import FINISHING, Heartbeat
from steadytrain.components.train.loop.control import StopRequests

if TYPE_CHECKING:
    from steadytrain.components.shared.events.types import AttemptOutcome
    from steadytrain.components.train.loop.training import Training


class Rank:
    """One rank of an attempt."""

    def __init__(self, folder: AttemptFolder) -> None:
        self.folder = folder
        self.number = int(os.environ.get("RANK", "0"))
        self.requests = StopRequests(folder.stop if self.number == 0 else None)
        self.heartbeat = Heartbeat(folder.heartbeat(self.number))
        self.training: Training | None = None
        self.compiled: Path | None = None

    def run(self) -> AttemptOutcome:
        """Train according to the attempt's specification. Rank 0 writes the result."""
        # Import late: torch takes seconds to import, and no signal may be lost in that time.
        from steadytrain.components.shared.config import load
        from steadytrain.components.shared.records import DataRecord
        from steadytrain.components.shared.storage import LocalStorage
        from steadytrain.components.shared.workspace import Workspace
        from steadytrain.components.sizing.recipe import learning_rate
        from steadytrain.components.train.checkpoint import Checkpoint, Lineage, open_store
        from steadytrain.components.train.checkpoint.cadence import Cadence
        from steadytrain.components.train.lease import Generations
        from steadytrain.components.train.loop.compiled import keep_compiled
        from steadytrain.components.train.loop.export_wait import beating, wait_for_file
        from steadytrain.components.train.loop.optim import set_rate
        from steadytrain.components.train.loop.reporter import Reporter
        from steadytrain.components.train.loop.setup import set_up
        from steadytrain.components.train.loop.training import Training

        spec = AttemptSpec.load(self.folder.spec)
        config = load(Path(spec.config))
        workspace = Workspace.of(config)
        stream = workspace.stream(f"train-a{spec.attempt}-r0") if self.number == 0 else None
        if config.training.torch_compile and keep_compiled(workspace.compiled):
            self.compiled = workspace.compiled
        parts = set_up(
            config,
            DataRecord.load(Path(spec.data)),
            spec.batch,
            skipped_batches=spec.skipped_batches,
            recipe=spec.recipe,
        )
        by_time = config.training.save_steps is None
        cadence = Cadence(spec.seconds_between_failures, spec.checkpoint_seconds)
        parts.heartbeat = self.heartbeat
        fence = partial(Generations(LocalStorage(workspace.lease)).fence, spec.generation)
        self.training = Training(
            parts,
            open_store(config, fence, Lineage(spec.generation, spec.checkpoints)),
            Reporter(stream, spec.attempt),
            self.requests,
            cadence if by_time and self.number == 0 else None,
        )
        if spec.resume_from:
            self.training.resume(Checkpoint.at(spec.resume_from))
        rate = learning_rate(parts.recipe) * spec.learning_rate_scale
        if parts.scheduler.base_lrs[0] != rate:
            # Set it after loading the state, which contains its own rates.
            set_rate(parts.scheduler, rate)
        outcome = self.training.run()
        beat = partial(parts.beat, FINISHING)
        beat()
        if self.number == 0:
            fence()
            with beating(beat):
                self._finish(self.training, outcome, workspace.model)
        else:
            wait_for_file(self.folder.result, beat)
        # All ranks exit together: torchrun ends the others once one exits with a nonzero status.
        parts.accelerator.wait_for_everyone()
        parts.accelerator.end_training()
        return outcome

    def _finish(self, training: Training, outcome: AttemptOutcome, model: Path) -> None:
        done = outcome in ("finished", "early_stopped")
        chosen = training.export(model) if done else training.best()
        AttemptResult(
            outcome=outcome,
            step=training.progress.step,
            max_steps=training.parts.steps,
            best_step=chosen.step,
            best_score=chosen.score,
            metric=chosen.metric,
            parameters=training.parts.parameters,
            model=str(model) if done else "",
        ).save(self.folder.result)
        if done:
            training.reporter.finished(training.progress, outcome, chosen.step, chosen.score)
        training.reporter.close()

    def report(self, error: BaseException) -> None:
        """Write why this rank failed, and after which step."""
        error = self._cause(error)
        step = self.training.progress.step if self.training else 0
        if isinstance(error, Diverged):
            # A non-finite value in a checkpoint is found only after training has moved on.
            step = error.step - 1
        RankError(
            rank=self.number,
            time=time.time(),
            kind=type(error).__name__,
            message=redact(str(error)),
            traceback=traceback_of(error),
            step=step,
            memory_needed=self._least_memory(),
        ).save(self.folder.error(self.number))

    def _cause(self, error: BaseException) -> BaseException:
        """Return the damage in the rows or the compiled code used, if it may explain the error."""
        if self.compiled is not None:
            from steadytrain.components.train.loop.compiled import without_damaged

            error = without_damaged(error, self.compiled)
        damaged = isinstance(error, (ArithmeticError, LookupError, TypeError, ValueError, Diverged))
        if damaged and self.training:
            parts = self.training.parts
            for rows in (parts.train, parts.validation):
                try:
                    rows.check_used()
                except DataError as damage:
                    return damage
        return error

    def _least_memory(self) -> int:
        from steadytrain.components.train.loop.memory import least_memory

        return least_memory(self.training.parts) if self.training else 0


def main(folder: str) -> int:
    """Run a rank. Return its exit status."""
    die_with_parent()
    place = AttemptFolder(Path(folder))
    answer_to_signal(place.stacks(int(os.environ.get("RANK", "0"))))
    rank = Rank(place)
    rank.requests.listen()
    try:
        outcome = rank.run()
    except (Exception, SystemExit) as error:
        # A user's code may call sys.exit, which would look like a rank that has ended well.
        print(traceback_of(error), end="", file=sys.stderr)
        rank.report(error)
        return 1
    # Python restores the default handler while it exits, and torchrun forwards SIGTERM a second
    # time. The rank would then appear to die of the signal instead of exiting on its own.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return PREEMPTED_EXIT if outcome == "preempted" else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
