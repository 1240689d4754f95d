"""The process that trains a learner: `python -m ...framework.rank MODULE:CLASS ATTEMPT_FOLDER`."""

from __future__ import annotations

import importlib
import sys
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING

from steadytrain.components.shared.errors import DataError
from steadytrain.components.train.attempt import AttemptFolder
from steadytrain.components.train.loop.process import RankProcess, serve

if TYPE_CHECKING:
    from collections.abc import Callable

    from steadytrain.components.shared.config import RunConfig
    from steadytrain.components.shared.events.types import AttemptOutcome
    from steadytrain.components.shared.records import DataRecord
    from steadytrain.components.train.framework.learner import Learner
    from steadytrain.components.train.framework.training import LearnerTraining


class LearnerRank(RankProcess):
    """The only rank of an attempt.

    Args:
        learner: address of the learner's class or function, `module:name`.
    """

    def __init__(self, folder: AttemptFolder, learner: str) -> None:
        super().__init__(folder)
        self.learner = learner
        self.training: LearnerTraining | None = None

    def run(self) -> AttemptOutcome:
        from steadytrain.components.train.checkpoint import Checkpoint
        from steadytrain.components.train.framework.training import LearnerTraining
        from steadytrain.components.train.loop.progress import Emitter

        learner = self.load()(self.config, self.data)
        stream = self.open_stream()
        self.training = LearnerTraining(
            learner,
            self.config,
            self.data,
            self.spec,
            self.store(),
            Emitter(stream, self.spec.attempt),
            self.requests,
            self.heartbeat,
            self.cadence(),
        )
        if self.spec.resume_from:
            self.training.resume(Checkpoint.at(self.spec.resume_from))
        outcome = self.training.run()
        steps = self.training.steps
        self.finish(self.training, outcome, steps=steps, parameters=learner.parameters)
        return outcome

    def load(self) -> Callable[[RunConfig, DataRecord], Learner]:
        """Import the learner's class or function."""
        module, _, name = self.learner.partition(":")
        result: Callable[[RunConfig, DataRecord], Learner] = attrgetter(name)(
            importlib.import_module(module)
        )
        return result

    @property
    def step(self) -> int:
        return self.training.progress.step if self.training else 0

    def cause(self, error: BaseException) -> BaseException:
        """Return the damage in the rows, if they changed on disk after they were read."""
        if self.training is not None:
            try:
                self.training.check_rows()
            except DataError as damage:
                return damage
        return error


if __name__ == "__main__":
    sys.exit(serve(sys.argv[2], partial(LearnerRank, learner=sys.argv[1])))
