"""How the pipeline's time was spent. For training's own time, see `spending.py`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from steadytrain.components.report.story import Attempt, Execution


@dataclass(frozen=True)
class Phase:
    """Seconds spent in one part of the run."""

    name: str
    seconds: float


def wall_seconds(executions: Sequence[Execution]) -> float:
    """Return the seconds from the start of the first step to the end of the last."""
    if not executions:
        return 0.0
    return max(item.end for item in executions) - executions[0].start


def phases(executions: Sequence[Execution]) -> list[Phase]:
    """Return the time of each step, and the time between steps if it exceeds half a second.

    Together they make up the wall time.
    """
    by_step: dict[str, float] = {}
    for item in executions:
        by_step[item.stage] = by_step.get(item.stage, 0.0) + item.seconds
    found = [Phase(stage, seconds) for stage, seconds in by_step.items()]
    between = wall_seconds(executions) - sum(by_step.values())
    if between > 0.5:
        found.append(Phase("between the steps", between))
    return found


def repeated_steps(attempts: Sequence[Attempt]) -> int:
    """Return how many optimizer steps were repeated.

    Steps are repeated if the attempt before ended after its last checkpoint.
    """
    return sum(max(0, before.last_step - after.first_step) for before, after in pairwise(attempts))
