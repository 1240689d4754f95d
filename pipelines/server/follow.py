"""A run on a server, seen from outside: its steps, their states, and how it ended."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Final

from steadytrain.components.shared.config.secrets import redact
from steadytrain.components.shared.errors import ServerError
from steadytrain.components.shared.kubeflow.connection import Server
from steadytrain.components.shared.patience import Patience

ENDED: Final = ("SUCCEEDED", "SKIPPED", "FAILED", "CANCELED")
"""The final states. KFP's own client waits forever for a run that was canceled."""

_POLL_SECONDS = 5.0
_PATIENCE_SECONDS = 600.0
"""How long a server may be unreachable while a run is followed."""
_DENIED_SECONDS = 180.0
"""How long a server may deny what it allowed before, as it does while it restarts."""

Steps = dict[str, "Step"]


@dataclass(frozen=True)
class Step:
    """A step of a run. seconds: how long it ran, or has been running; None before its start."""

    state: str
    seconds: float | None


@dataclass(frozen=True)
class PipelineOutcome:
    """How a run ended. message: the server's error message, if there is one."""

    state: str
    steps: Steps
    message: str

    @property
    def succeeded(self) -> bool:
        return self.state in ("SUCCEEDED", "SKIPPED")


def follow(
    server: Server,
    run_id: str,
    names: Collection[str],
    on_change: Callable[[Steps], object],
    *,
    poll_seconds: float = _POLL_SECONDS,
    patience_seconds: float = _PATIENCE_SECONDS,
    denied_seconds: float = _DENIED_SECONDS,
) -> PipelineOutcome:
    """Poll a run until it ends.

    Args:
        names: the steps to report. To the server, a step is several nodes: its driver, the step
            itself, its executors and their retries. Groups of steps are nodes, too.
        on_change: called with the steps, in the order of their starts, when a state has changed.
        patience_seconds: how long to retry a broken connection.
        denied_seconds: how long the server may deny access (401, 403).

    Raises:
        ServerError: no connection or no access for longer than that, or a permanent refusal.
    """
    states: dict[str, str] = {}
    patience = Patience(away=patience_seconds, denied=denied_seconds)
    while True:
        try:
            run = server.runs.run_service_get_run(run_id=run_id)
        except ServerError as error:
            if not patience.bears(error):
                raise
            time.sleep(poll_seconds)
            continue
        patience.reset()
        steps = _steps(run, names)
        now = {name: step.state for name, step in steps.items()}
        if now != states:
            states = now
            on_change(steps)
        if run.state in ENDED:
            said = run.error.message if run.error else ""
            return PipelineOutcome(str(run.state), steps, redact(said or ""))
        time.sleep(poll_seconds)


def _steps(run: Any, names: Collection[str]) -> Steps:
    """Return the steps in the order of their starts."""
    details = (run.run_details and run.run_details.task_details) or ()
    shown = [item for item in details if item.display_name in names]
    return {item.display_name: _step(item) for item in sorted(shown, key=_began)}


def _began(task: Any) -> float:
    return _seconds(task.start_time) or _seconds(task.create_time) or float("inf")


def _step(task: Any) -> Step:
    began = _seconds(task.start_time)
    end = _seconds(task.end_time) or time.time()
    return Step(str(task.state or "PENDING"), max(0.0, end - began) if began else None)


def _seconds(moment: Any) -> float:
    """Return the seconds since 1970. 0 means not set, for which the server may also send 1970."""
    return max(0.0, moment.timestamp()) if moment else 0.0
