"""Training with another framework than PyTorch: the author writes a Learner, and gets the rest."""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial

from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.shared.events import Reader
from steadytrain.components.shared.records import DataRecord
from steadytrain.components.sizing.hardware import CPU
from steadytrain.components.train.framework.learner import Learned, Learner, NewLearner
from steadytrain.components.train.launch.launcher import launcher_for
from steadytrain.components.train.recovery.outcome import Outcome
from steadytrain.components.train.recovery.policy import decide
from steadytrain.components.train.recovery.supervisor import OnValidation, Supervisor
from steadytrain.components.train.recovery.takeover import LeasedRun

__all__ = ["Learned", "Learner", "LearnerTrainer"]


_FRAMEWORK = "steadytrain.components.train.framework"


@dataclass(frozen=True)
class LearnerTrainer:
    """A trainer for the entry-point group `steadytrain.trainers`.

    learner: the class, or a function of its module that chooses one.
    libraries: those of the function's learners.
    on_cpu: the tasks for which all of the function's learners compute on the CPU.
    """

    learner: type[Learner] | NewLearner
    libraries: tuple[str, ...] = ()
    on_cpu: Collection[str] = ()

    @property
    def imports(self) -> tuple[str, ...]:
        """The modules that a process imports before it trains."""
        libraries = getattr(self.learner, "libraries", self.libraries)
        return f"{_FRAMEWORK}.training", self.learner.__module__, *libraries

    def __call__(
        self,
        config: RunConfig,
        data: DataRecord,
        *,
        on_validation: OnValidation | None,
        sinks: Sequence[Reader],
        until: int | None = None,
        leased: LeasedRun | None = None,
    ) -> Outcome:
        """Train in one process, on this machine or in a pod, under the supervisor.

        Raises:
            BadInput: the configuration asks for several ranks; or as for `train.step.run`.
            RunBusy: another process is training this run.
        """
        _check_alone(config)
        module = self.learner.__module__
        program = (
            sys.executable,
            "-m",
            f"{_FRAMEWORK}.rank",
            f"{module}:{self.learner.__qualname__}",
        )
        # The OOM fallbacks change settings that only PyTorch's loop has.
        policy = partial(decide, settings=config.recovery, run_id=config.run_id, fallbacks=False)
        lease, agent = (leased.lease, leased.agent) if leased else (None, None)
        here = config
        if getattr(self.learner, "on_cpu", config.data.task in self.on_cpu) is True:
            # The attempt names no GPU of this machine.
            compute = config.compute.model_copy(update={"device": CPU})
            here = config.model_copy(update={"compute": compute})
        with launcher_for(here, program, self.imports, agent) as launcher:
            return Supervisor(
                config, data, launcher, on_validation, sinks, policy, until, lease
            ).run()


def _check_alone(config: RunConfig) -> None:
    for field in ("nodes", "nproc_per_node"):
        value = getattr(config.compute, field)
        if value > 1:
            raise BadInput(
                f"compute.{field} = {value}: model.framework {config.model.framework!r} trains in "
                "one process",
                remedy="set it to 1",
            )
