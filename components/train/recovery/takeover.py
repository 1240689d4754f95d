"""Takes a run over: holds it, refuses what cannot continue it, and ends what was left undone."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from contextvars import ContextVar
from functools import partial
from typing import Final

from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.shared.events import Cursor
from steadytrain.components.shared.events.types import AttemptEnded, Warned
from steadytrain.components.shared.lease import Lease, hold
from steadytrain.components.shared.retry import REJECTED_SECONDS
from steadytrain.components.shared.storage import LocalStorage
from steadytrain.components.shared.workspace import Workspace
from steadytrain.components.train.agent.processes import end_processes
from steadytrain.components.train.failures import FailureClass
from steadytrain.components.train.recovery.history import History, is_of_rank
from steadytrain.components.train.recovery.ledger import Ledger
from steadytrain.components.train.recovery.settings import may_differ, refused, stated
from steadytrain.components.train.recovery.times import (
    last_sign_of_life,
    pods_waited,
    unrecorded,
)

_SUPERVISOR_DIED: Final = "the program that supervised this attempt died"
_owned_here: ContextVar[Lease | None] = ContextVar("lease", default=None)


@contextlib.contextmanager
def owned(config: RunConfig) -> Iterator[Lease]:
    """Hold a run for this process. Inside a context that already holds it, reuse that lease.

    Raises:
        RunBusy: a live supervisor holds it; the message says which one, where, and since when.
        BadInput, StorageError: see `hold`.
    """
    workspace = Workspace.of(config)
    storage = LocalStorage(workspace.lease)
    outer = _owned_here.get()
    if outer is not None and outer.generations.storage.uri == storage.uri:
        yield outer
        return
    with hold(
        storage,
        run_id=workspace.run_id,
        seconds=config.recovery.lease_seconds,
        after=Ledger(workspace).generation(),
        tell=partial(_tell, workspace),
    ) as lease:
        token = _owned_here.set(lease)
        try:
            yield lease
        finally:
            _owned_here.reset(token)


def _tell(workspace: Workspace, message: str) -> None:
    """Report a wait, in a file that no other supervisor writes."""
    with contextlib.closing(workspace.stream(f"lease-{os.getpid()}")) as stream:
        stream.emit(Warned(stage="train", message=message))


def check_continues(config: RunConfig) -> None:
    """Compare the configuration with the one that the run trained with before, if it did.

    The supervisor compares the data later, once they are prepared, and reports a damaged ledger.

    Raises:
        BadInput: a field differs that decides what is learned.
    """
    workspace = Workspace.of(config)
    try:
        history = Ledger(workspace).history()
    except BadInput:
        return
    if history.supervisor is None or not history.attempts:
        return
    if changed := refused(history.supervisor.settings, stated(config)):
        raise other_inputs(workspace, changed)


def other_inputs(workspace: Workspace, changed: list[str]) -> BadInput:
    """Return the error for a run that started with other data, another model or training.

    Args:
        changed: the fields with both values. May be empty if they are unknown.
    """
    problem = (
        f"run {workspace.run_id!r} in {workspace.output} was started with other data, model or "
        "training, and cannot continue with these"
    )
    return BadInput(
        ": ".join([problem, *filter(None, ["; ".join(changed)])]),
        remedy="give this run another name (run: ...), or use the configuration that it was "
        f"started with, in which these may differ: {may_differ()}; or remove {workspace.folder}",
    )


def end_lost_attempts(ledger: Ledger, workspace: Workspace) -> None:
    """End the attempts whose supervisor died, and make sure that their ranks are gone too.

    Also record what ranks reported last, which their supervisor did not.
    """
    end_processes(workspace.attempts)
    attempts = ledger.history().attempts
    lost = {item.started.attempt: item for item in attempts if item.ended is None}
    found = (item.event for item in Cursor(workspace.events).read())
    events = [item for item in found if is_of_rank(item) or getattr(item, "attempt", 0) in lost]
    for attempt in attempts:
        for event in unrecorded(attempt, events):
            ledger.record(event, seconds=REJECTED_SECONDS)
    for attempt in lost.values():
        seen, step = last_sign_of_life(attempt, events)
        ended = AttemptEnded(
            time=seen,
            attempt=attempt.started.attempt,
            outcome="failed",
            step=step,
            failure_class=FailureClass.NODE_LOST,
            message=_SUPERVISOR_DIED,
            waited_seconds=pods_waited(attempt.started, events, seen),
        )
        ledger.record(ended, seconds=REJECTED_SECONDS)


def undecided(history: History) -> AttemptEnded | None:
    """Return the failed attempt after which the supervisor died before it decided."""
    failed = history.attempts[-1].ended if history.attempts else None
    if failed is None or not failed.failure_class or failed.message == _SUPERVISOR_DIED:
        return None
    decided = {item.attempt for item in history.decisions if not item.in_place}
    return None if failed.attempt in decided else failed


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
