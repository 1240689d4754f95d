"""Cleans up after earlier supervisors: lost attempts and pending decisions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from steadytrain.components.shared.events import Cursor
from steadytrain.components.shared.events.types import (
    AttemptEnded,
    DecisionMade,
    RecoveryDecision,
)
from steadytrain.components.shared.retry import REJECTED_SECONDS
from steadytrain.components.shared.workspace import Workspace
from steadytrain.components.train.agent.processes import end_processes
from steadytrain.components.train.failures import Failure, FailureClass
from steadytrain.components.train.recovery.history import History, is_of_rank
from steadytrain.components.train.recovery.ledger import Ledger
from steadytrain.components.train.recovery.times import (
    last_sign_of_life,
    pods_waited,
    unrecorded,
)

_SUPERVISOR_DIED = "the program that supervised this attempt died"


@dataclass(frozen=True)
class Takeover:
    """The takeover of one run.

    tell: records an event while no attempt is running; with `placed`, its time is by the run's
        clock already.
    """

    ledger: Ledger
    workspace: Workspace
    tell: Callable[..., None]

    def end_lost_attempts(self, history: History) -> None:
        """End the attempts whose supervisor died, and make sure that their ranks are gone too.

        Also record what ranks reported last, which their supervisor did not.
        """
        end_processes(self.workspace.attempts)
        lost = {item.started.attempt: item for item in history.attempts if item.ended is None}
        found = (item.event for item in Cursor(self.workspace.events).read())
        events = [item for item in found if is_of_rank(item) or getattr(item, "attempt", 0) in lost]
        for attempt in history.attempts:
            for event in unrecorded(attempt, events):
                self.ledger.record(event, seconds=REJECTED_SECONDS)
        for attempt in lost.values():
            seen, step = last_sign_of_life(attempt, events)
            self.tell(
                AttemptEnded(
                    time=seen,
                    attempt=attempt.started.attempt,
                    outcome="failed",
                    step=step,
                    failure_class=FailureClass.NODE_LOST,
                    message=_SUPERVISOR_DIED,
                    waited_seconds=pods_waited(attempt.started, events, seen),
                ),
                placed=True,
            )

    def decide_again(
        self, history: History, policy: Callable[[History, Failure], RecoveryDecision]
    ) -> None:
        """Make the decision that an earlier supervisor died before making.

        A decision to stop is not recorded: whoever restarted the run wants another try.
        """
        last = history.attempts[-1] if history.attempts else None
        failed = last.ended if last else None
        if failed is None or not failed.failure_class or failed.message == _SUPERVISOR_DIED:
            return
        if any(item.attempt == failed.attempt and not item.in_place for item in history.decisions):
            return
        decision = policy(history, Failure.of(failed))
        if decision.action != "stop":
            self.tell(DecisionMade.after(failed.attempt, failed, decision))


def last_folder(workspace: Workspace) -> int:
    """Return the highest attempt number that has a folder; 0 if there is none."""
    names = (path.name for path in workspace.attempts.glob("*"))
    return max((int(name) for name in names if name.isdecimal()), default=0)


def left_to_wait(history: History, now: float) -> float:
    """Return the seconds left of the last decision's wait, if its supervisor died in it.

    Args:
        now: the time by the run's clock.
    """
    last = history.decisions[-1] if history.decisions else None
    if last is None or last.action == "stop" or last.attempt + 1 != history.next_attempt:
        return 0.0
    return min(max(0.0, last.time + last.delay_seconds - now), last.delay_seconds)
