"""What a study's driver needs of whatever runs its trials.

The driver decides which trial trains until which step. It never looks at processes or pods, and
what runs the trials never decides anything. So the same driver works on one machine and on a
cluster, and a test can drive it with a formula instead of a training run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

from steadytrain.components.shared.config import RunConfig

Condition = Literal["new", "running", "paused", "finished", "failed"]
"""new: never started. paused: stopped at its cut or killed, with a checkpoint, perhaps that of its
last step. finished: reached the end of its schedule, or stopped early. failed: recovery gave up."""


@dataclass(frozen=True)
class Validation:
    """A validation of a trial.

    step: optimizer steps done.
    metrics: the value of each validation metric by name.
    """

    step: int
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class TrialState:
    """What is known about a trial from its own files.

    step: optimizer steps done and saved or, for a running trial, reported.
    validations: all of them, by step; each step once, whatever was repeated after a failure.
    seconds: time spent training, over all processes that worked on the trial.
    failure: class of the failure that ended the trial (see docs/reference/failures), or "".
    error: the failure's message, or "".
    fallbacks: OOM fallbacks that were applied, by name.
    latency_ms: milliseconds of the exported model for one sequence; None if they were not measured.
    """

    condition: Condition
    step: int = 0
    validations: tuple[Validation, ...] = ()
    seconds: float = 0.0
    failure: str = ""
    error: str = ""
    fallbacks: tuple[str, ...] = ()
    latency_ms: float | None = None

    def at(self, until: int) -> TrialState:
        """Return the state in which a trial paused at a step that it has passed; else its state.

        A log that lost its last records is behind its trials.
        """
        steps = [self.step, *(item.step for item in self.validations)]
        if self.condition == "running" or max(steps) <= until:
            return self
        before = tuple(item for item in self.validations if item.step <= until)
        return TrialState("paused", until, before, self.seconds, fallbacks=self.fallbacks)


class Trials(Protocol):
    """The trials of one study. A trial is identified by its number, from 0.

    Every method may be called again after the driver died, and by another process than before.
    """

    def train(self, number: int, config: RunConfig, until: int) -> None:
        """Train a trial until a step in the background. Do nothing if that is already going on.

        A discarded trial has no checkpoint: it begins again, unless it ended or has that step.

        Args:
            config: the trial's complete configuration, always the same for one number. The trial
                is an ordinary run, and its schedule is that of the whole run: `until` cuts it and
                does not shorten it.
            until: optimizer steps; a multiple of `training.eval_steps`, or the last step.
        """

    def state(self, number: int) -> TrialState:
        """Return what is known about a trial. Cheap enough to call several times a second."""

    def stop(self, number: int) -> None:
        """End the processes of a trial, which keeps its checkpoint. Return when they are gone."""

    def discard(self, number: int) -> None:
        """Remove everything of a trial except what `state` and its learning curve need."""

    def attach(self) -> frozenset[int]:
        """Return the trials that processes of an earlier driver are still training.

        They count as this driver's own from now on. Processes that cannot be taken over are ended
        first. Call this once, before anything else.
        """

    def close(self) -> None:
        """End all processes, whose trials keep their checkpoints."""
