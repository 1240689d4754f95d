"""A rank: `python -m steadytrain.components.train.loop.main ATTEMPT_FOLDER`.

Runs alone or as one of several. Exit status: 0 if training ended or stopped on request, 143 if it
left on SIGTERM, 1 if it failed (rank-<r>.error.json has the reason).
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from steadytrain.components.shared.errors import DataError, StorageError
from steadytrain.components.train.attempt import FINISHING, STARTING, AttemptFolder
from steadytrain.components.train.failures import Diverged
from steadytrain.components.train.loop.process import RankProcess, serve

if TYPE_CHECKING:
    from steadytrain.components.shared.events.types import AttemptOutcome
    from steadytrain.components.train.loop.training import Training


class Rank(RankProcess):
    """One rank that trains with PyTorch."""

    def __init__(self, folder: AttemptFolder) -> None:
        super().__init__(folder)
        self.training: Training | None = None
        self.compiled: Path | None = None

    def run(self) -> AttemptOutcome:
        # Import late: torch takes seconds to import, and no signal may be lost in that time.
        from steadytrain.components.sizing.recipe import learning_rate
        from steadytrain.components.train.checkpoint import Checkpoint
        from steadytrain.components.train.loop.control import StoppedEarly, Watch
        from steadytrain.components.train.loop.kernels import keep_compiled
        from steadytrain.components.train.loop.process import wait_for_file
        from steadytrain.components.train.loop.reporter import Reporter
        from steadytrain.components.train.loop.setup import set_up
        from steadytrain.components.train.loop.training import Training
        from steadytrain.components.train.loop.usage import Usage, report_split

        spec, config, workspace = self.spec, self.config, self.workspace
        stream = self.open_stream() if self.number == 0 else None
        if config.training.torch_compile and keep_compiled(workspace.compiled):
            self.compiled = workspace.compiled
        reporter = Reporter(stream, spec.attempt)
        try:
            parts = set_up(
                config,
                self.data,
                spec.batch,
                skipped_batches=spec.skipped_batches,
                recipe=spec.recipe,
                watch=Watch(
                    beat=partial(self.heartbeat.beat, STARTING),
                    flags=self.requests.flags,
                    progress=reporter.worked,
                    warn=reporter.warn,
                    split=partial(report_split, workspace, spec.attempt, self.number),
                ),
            )
        except StoppedEarly as stop:
            reporter.close()
            return stop.outcome
        parts.heartbeat = self.heartbeat
        parts.usage = Usage(workspace, spec.attempt, self.number)
        if config.tune.constraints.latency_ms is not None and self.number == 0:
            reporter.latency(parts, workspace)
        self.requests.cut_at(spec.until, eval_steps=config.training.eval_steps, steps=parts.steps)
        self.training = Training(
            parts,
            self.store(),
            reporter,
            self.requests,
            self.cadence(),
            peak=partial(spec.peak, configured=learning_rate(parts.recipe)),
            changes=spec.changes,
        )
        if spec.resume_from:
            self.training.resume(Checkpoint.at(spec.resume_from))
        outcome = self.training.run()
        beat = partial(parts.beat, FINISHING)
        beat()
        if self.number == 0:
            self.finish(self.training, outcome, steps=parts.steps, parameters=parts.parameters)
        else:
            wait_for_file(self.folder.result, beat)
        # All ranks exit together: the agent ends the others once one exits with a nonzero status.
        parts.accelerator.wait_for_everyone()
        parts.accelerator.end_training()
        return outcome

    @property
    def step(self) -> int:
        return self.training.progress.step if self.training else 0

    def cause(self, error: BaseException) -> BaseException:
        """Return the damage in the rows or the compiled code used, if it may explain the error."""
        if self.compiled is not None:
            from steadytrain.components.train.loop.kernels import without_damaged

            error = without_damaged(error, self.compiled)
        damaged = isinstance(error, (ArithmeticError, LookupError, TypeError, ValueError, Diverged))
        if damaged and self.training:
            parts = self.training.parts
            for rows in (parts.train, parts.validation):
                try:
                    rows.check_used()
                except (DataError, StorageError) as damage:
                    return damage
        return error

    def least_memory(self) -> int:
        from steadytrain.components.train.loop.halving import least_memory

        return least_memory(self.training.parts) if self.training else 0


def main(folder: str) -> int:
    """Run a rank. Return its exit status."""
    return serve(folder, Rank)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
