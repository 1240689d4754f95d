"""How training ended, in one object, and its recorded validations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from steadytrain.components.shared.config.fields import Decision
from steadytrain.components.shared.errors import BadInput, Pruned
from steadytrain.components.shared.events import read_events
from steadytrain.components.shared.events.types import AttemptOutcome, Validated
from steadytrain.components.shared.output_log import redact_file, tail
from steadytrain.components.shared.storage.local import Awaited
from steadytrain.components.shared.workspace import Workspace
from steadytrain.components.train.attempt import AttemptFolder, AttemptResult, Beat
from steadytrain.components.train.failures import Failure, FailureClass, classify
from steadytrain.components.train.recovery.history import History

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
    """How one attempt ended.

    survived: errors that were reported although it succeeded: a rank that hung may go on when its
        stacks are taken, and finish before it is killed.
    """

    outcome: AttemptOutcome
    result: AttemptResult | None
    failure: Failure | None
    survived: Sequence[str] = ()


def conclude(
    folder: AttemptFolder, exits: Mapping[int, int], requested: AttemptOutcome | None
) -> Ending:
    """Determine how an attempt ended after its ranks exited.

    Success requires both rank 0's result and exit status 0 from every rank.

    Args:
        requested: the outcome for which the ranks were asked to stop, if they were.
    """
    result = AttemptResult.load(folder.result) if Awaited(folder.result).there() else None
    well = not any(exits.values())
    if result is not None and result.outcome in SUCCESSES and well:
        survived = [f"{error.kind}: {error.message}" for error in folder.errors()]
        return Ending(result.outcome, result, None, survived)
    if requested is not None:
        # Errors from ranks that were stopped on request are not failures.
        return Ending(requested, result, None)
    if result is not None and result.outcome in ("stopped", "pruned") and well:
        return Ending(result.outcome, result, None)
    for rank in exits:
        redact_file(folder.log(rank))  # an agent that was killed has not done it
    logs = {rank: tail(folder.log(rank)) for rank in exits}
    failure = classify(folder.errors(), exits, logs, {rank: _step(folder, rank) for rank in exits})
    preempted = failure.failure_class is FailureClass.PREEMPTION
    return Ending("preempted" if preempted else "failed", result, failure)


def repeated(ending: Ending, history: History, *, saved: bool) -> Ending:
    """Return an ending of unknown class as a user's bug if the same exception ended the run before.

    It is the same one if its text is the same and there is no new checkpoint in between. It is also
    the same one if the last attempt ended with it after the same step: a checkpoint of an earlier
    step does not lead past it.

    Args:
        history: with the attempt that ended this way, whose end is not recorded yet.
        saved: whether that attempt saved a checkpoint.
    """
    failure = ending.failure
    if failure is None or failure.failure_class is not FailureClass.UNKNOWN:
        return ending
    if not failure.traceback or not _came_before(failure, history, saved=saved):
        return ending
    bug = FailureClass.USER_BUG
    return replace(ending, failure=replace(failure, failure_class=bug, remedy=bug.remedy))


def _came_before(failure: Failure, history: History, *, saved: bool) -> bool:
    decided = [item.action for item in history.decisions if not item.in_place]
    if decided[-1:] == ["stop"]:
        return False
    stalled, ended = (
        [attempt.ended for attempt in attempts if attempt.ended]
        for attempts in (history.stalled, history.attempts)
    )
    if not saved and any(item.message == failure.message for item in stalled):
        return True
    return (
        bool(ended)
        and ended[-1].failed_step == failure.failed_step > 0
        and ended[-1].message.partition(":")[0] == failure.message.partition(":")[0]
    )


def _step(folder: AttemptFolder, rank: int) -> int:
    try:
        beat = Beat.read(folder.heartbeat(rank))
    except OSError:
        return 0
    return beat.step if beat else 0


def check_callback(on_validation: object) -> None:
    """Reject anything but a function and None.

    Raises:
        BadInput: it cannot be called.
    """
    if on_validation is not None and not callable(on_validation):
        raise BadInput(
            f"on_validation = {on_validation!r:.80} is not a function",
            remedy="give a function that takes a Validated event and returns whether to continue",
        )


def replay(workspace: Workspace, on_validation: Callable[[Validated], bool]) -> None:
    """Call a function with the validations of a run, in the order of their steps.

    A step that was validated again after a failure counts once, with its latest validation.

    Raises:
        Pruned: the function returned False.
    """
    events = read_events(workspace.events)
    latest = {event.step: event for event in events if isinstance(event, Validated)}
    for step, event in sorted(latest.items()):
        if not on_validation(event):
            raise Pruned(step)
