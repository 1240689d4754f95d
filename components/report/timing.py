"""Where a run's time went."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from steadytrain.components.report.story import Attempt, Execution


@dataclass(frozen=True)
class Phase:
    """Seconds of a part of the run. `part_of` names the phase that it is a part of."""

    name: str
    seconds: float
    part_of: str = ""


def wall_seconds(executions: Sequence[Execution]) -> float:
    """From the start of the first step to the end of the last."""
    if not executions:
        return 0.0
    return max(item.end for item in executions) - executions[0].start


def phases(executions: Sequence[Execution], attempts: Sequence[Attempt]) -> list[Phase]:
    """The steps, training's parts, and what lay between; the steps and that add up to the wall."""
    by_step: dict[str, float] = {}
    for item in executions:
        by_step[item.stage] = by_step.get(item.stage, 0.0) + item.seconds
    found: list[Phase] = []
    for stage, seconds in by_step.items():
        found.append(Phase(stage, seconds))
        if stage == "train" and attempts:
            found += _training(seconds, attempts)
    between = wall_seconds(executions) - sum(by_step.values())
    if between > 0.5:
        found.append(Phase("between the steps", between))
    return found


def repeated_steps(attempts: Sequence[Attempt]) -> int:
    """Optimizer steps taken anew because the attempt before was cut off after its checkpoint."""
    return sum(max(0, before.last_step - after.first_step) for before, after in pairwise(attempts))


def _training(seconds: float, attempts: Sequence[Attempt]) -> list[Phase]:
    at_work = sum(attempt.end - attempt.start for attempt in attempts)
    starting = sum(attempt.ready - attempt.start for attempt in attempts if attempt.ready)
    saving = sum(item.seconds for attempt in attempts for item in attempt.checkpoints)
    return [
        Phase("starting the ranks", starting, "train"),
        Phase("training and validating", max(0.0, at_work - starting - saving), "train"),
        Phase("saving checkpoints", saving, "train"),
        Phase("around the attempts", max(0.0, seconds - at_work), "train"),
    ]
