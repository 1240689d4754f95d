"""How training ended, in one object."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from steadytrain.components.shared.decision import Decision
from steadytrain.components.shared.events.types import AttemptOutcome
from steadytrain.components.train.attempt import AttemptFolder, AttemptResult
from steadytrain.components.train.failures import Failure, FailureClass, classify
from steadytrain.components.train.heartbeat import Beat
from steadytrain.components.train.output import tail

SUCCESSES: tuple[AttemptOutcome, ...] = ("finished", "early_stopped")


@dataclass(frozen=True)
class Outcome:
    """How training ended.

    outcome: "finished" and "early_stopped" have a model; the other outcomes can be resumed.
    result: rank 0's result, if it wrote one.
    failure: why training did not continue by itself; None if it succeeded or was asked to stop.
    step: the last known step.
    attempts, seconds: of the complete run, including earlier processes.
    account: what was tried since the last new checkpoint, one line each.
    decisions: settings that were chosen or could have been, each with its reason.
    """

    outcome: AttemptOutcome
    step: int
    attempts: int
    seconds: float
    result: AttemptResult | None = None
    failure: Failure | None = None
    account: Sequence[str] = ()
    decisions: Sequence[Decision] = ()

    @property
    def succeeded(self) -> bool:
        return self.outcome in SUCCESSES


@dataclass(frozen=True)
class Ending:
    """How one attempt ended."""

    outcome: AttemptOutcome
    result: AttemptResult | None
    failure: Failure | None


def conclude(
    folder: AttemptFolder, exits: Mapping[int, int], requested: AttemptOutcome | None
) -> Ending:
    """Determine how an attempt ended after its ranks exited.

    Success requires both rank 0's result and exit status 0 from every rank.

    Args:
        requested: the outcome for which the ranks were asked to stop, if they were.
    """
    result = AttemptResult.load(folder.result) if folder.result.is_file() else None
    well = not any(exits.values())
    if result is not None and result.outcome in SUCCESSES and well:
        return Ending(result.outcome, result, None)
    if requested is not None:
        # Errors from ranks that were stopped on request are not failures.
        return Ending(requested, result, None)
    if result is not None and result.outcome in ("stopped", "pruned") and well:
        return Ending(result.outcome, result, None)
    logs = {rank: tail(folder.log(rank)) for rank in exits}
    failure = classify(folder.errors(), exits, logs, {rank: _step(folder, rank) for rank in exits})
    preempted = failure.failure_class is FailureClass.PREEMPTION
    return Ending("preempted" if preempted else "failed", result, failure)


def _step(folder: AttemptFolder, rank: int) -> int:
    beat = Beat.read(folder.heartbeat(rank))
    return beat.step if beat else 0
