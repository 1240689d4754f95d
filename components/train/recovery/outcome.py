"""How training ended, in one object."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from steadytrain.components.shared.decision import Decision
from steadytrain.components.shared.events.types import AttemptOutcome
from steadytrain.components.train.attempt import AttemptFolder, AttemptResult
from steadytrain.components.train.heartbeat import Beat
from steadytrain.components.train.recovery.failures import Failure, FailureClass, classify
from steadytrain.components.train.recovery.output import tail

SUCCESSES: tuple[AttemptOutcome, ...] = ("finished", "early_stopped")


@dataclass(frozen=True)
class Outcome:
    """How training ended.

    outcome: "finished" and "early_stopped" have a model; the others can be continued.
    result: what rank 0 told, where it came to that.
    failure: why it did not go on by itself; None where it ended well or was asked to stop.
    step: the last step that is known of.
    attempts, seconds: of the whole run, earlier programs included.
    account: what was tried since the last new checkpoint, a line each.
    decisions: what was open or might have been, each with its reason.
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
    """How an attempt whose ranks are down has ended.

    A success needs both: rank 0's result, and every rank leaving with status 0.

    Args:
        requested: the outcome for which the ranks were asked to stop, if they were.
    """
    result = AttemptResult.load(folder.result) if folder.result.is_file() else None
    well = not any(exits.values())
    if result is not None and result.outcome in SUCCESSES and well:
        return Ending(result.outcome, result, None)
    if requested is not None:
        # What ranks say that were taken down on request is no failure.
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
