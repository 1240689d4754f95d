"""Explain what happened in a run, in ten lines or fewer, for a terminal.

Up to three more lines name damaged files, and up to three more the problems that were found. One
more says that memory ran out outside the training itself.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from steadytrain.components.observe.diagnosis import findings
from steadytrain.components.report.facts import Facts, gather
from steadytrain.components.report.sentences import recovery
from steadytrain.components.report.spending import Spending
from steadytrain.components.report.story import RunSummary, outcome
from steadytrain.components.report.words import number, percent
from steadytrain.components.shared.controls import on_one_line
from steadytrain.components.shared.events.types import BatchSplit, StepFailed
from steadytrain.components.shared.quantities import duration
from steadytrain.components.shared.workspace import Workspace
from steadytrain.components.train.recovery.history import History

RECOVERIES = 4
"""How many of the newest recoveries are shown. Earlier ones are only counted."""
DAMAGES = 3
"""How many unreadable files are listed. The report lists all of them."""
PROBLEMS = 3
"""How many problems of the training are listed. The report lists all of them."""
LONGEST = 300


def explain(workspace: Workspace, *, running: bool = False) -> list[str]:
    """Return outcome, attempts, recoveries, checkpoint, times, problems, and what to do next."""
    facts = gather(workspace)
    standing = outcome(facts)
    lines = [f"{workspace.run_id} is running." if running else standing.sentence]
    if standing.failure and not running:
        lines.append(f"{standing.failure.error}: {standing.failure.message}")
    lines += [f"damaged: {problem}" for problem in facts.unreadable[:DAMAGES]]
    lines += _training(facts)
    lines += [event.message for event in facts.of(BatchSplit)[-1:]]
    found = findings(facts.events)
    lines += map(str, found[:PROBLEMS])
    lines += [f"({len(found) - PROBLEMS} more problems)"] if len(found) > PROBLEMS else []
    lines.append(f"next: {_next(workspace, standing, running=running)}")
    return [_short(line) for line in lines]


def as_data(workspace: Workspace, *, running: bool = False) -> dict[str, Any]:
    """Return the same for programs. Times are seconds; None means unknown or not reached."""
    facts = gather(workspace)
    standing, history, times = outcome(facts), facts.history, Spending.of(facts).times
    return {
        "run": workspace.run_id,
        "state": "running" if running else standing.state,
        "summary": standing.sentence,
        "failure": failure_as_data(None if running else standing.failure),
        "damaged": facts.unreadable,
        "attempts": [
            {
                "attempt": attempt.started.attempt,
                "resumed_from_step": attempt.started.resumed_from_step or 0,
                "outcome": attempt.ended.outcome if attempt.ended else None,
                "failure_class": attempt.ended.failure_class if attempt.ended else None,
            }
            for attempt in history.attempts
        ],
        "recoveries": recoveries(history),
        "checkpoint_step": history.last_step or None,
        "max_steps": history.planned_steps,
        "training_seconds": times.wall,
        "lost_seconds": times.lost,
        "goodput": times.goodput if times.wall else None,
        "problems": [asdict(item) for item in findings(facts.events)],
        "next": _next(workspace, standing, running=running),
    }


def failure_as_data(failure: StepFailed | None) -> dict[str, str] | None:
    """Return the failure of a step for programs."""
    if failure is None:
        return None
    names = ("stage", "error", "message", "remedy")
    return {name: getattr(failure, name) for name in names}


def recoveries(history: History) -> list[str]:
    """Return a line for each failed attempt: what failed, why, and what was decided and changed.

    Leave out a failure without a decision or a later attempt.
    """
    decided = {item.attempt: item for item in history.decisions}
    lines = []
    for index, attempt in enumerate(history.attempts):
        ended, after = attempt.ended, history.attempts[index + 1 :]
        decision = decided.get(attempt.started.attempt)
        if ended is None or not ended.failure_class or not (decision or after):
            continue
        step = after[0].started.resumed_from_step if after else history.last_step
        lines.append(recovery(ended, decision, step or 0))
    return lines


def _training(facts: Facts) -> Iterator[str]:
    history = facts.history
    if not history.attempts:
        yield "training has not been attempted"
        return
    yield _attempts(history)
    described = recoveries(history)
    earlier = len(described) - RECOVERIES
    if earlier > 0:
        yield f"({earlier} earlier {'recovery' if earlier == 1 else 'recoveries'})"
    yield from described[-RECOVERIES:]
    planned = history.planned_steps
    of = "" if planned is None else f" of {number(planned)}"
    newest = history.last_step
    stands = f"newest checkpoint at step {number(newest)}{of}" if newest else "no checkpoint yet"
    times = Spending.of(facts).times
    yield (
        f"{stands}; {duration(times.wall)} of training, goodput {percent(times.goodput)}, "
        f"{duration(times.lost)} lost"
    )


def _attempts(history: History) -> str:
    """Return how many attempts there were and how they ended, most frequent first."""
    ends = Counter(
        "running or cut off"
        if attempt.ended is None
        else attempt.ended.failure_class or attempt.ended.outcome.replace("_", " ")
        for attempt in history.attempts
    )
    count = len(history.attempts)
    described = ", ".join(f"{times} {end}" for end, times in ends.most_common())
    return f"{count} attempt{'s' if count > 1 else ''}: {described}"


def _next(workspace: Workspace, standing: RunSummary, *, running: bool) -> str:
    place = f"{workspace.run_id} --output {shlex.quote(str(workspace.output))}"
    if running:
        return f"nothing: the run recovers by itself; `steadytrain stop {place}` stops it"
    if standing.state == "finished":
        return f"nothing; `steadytrain report {place}` shows the details"
    again = f"`steadytrain resume {place}`"
    if standing.failure and standing.failure.remedy:
        return f"{again}, after this fix: {' '.join(standing.failure.remedy.split())}"
    return again


def _short(line: str) -> str:
    first = on_one_line(line.partition("\n")[0])
    return first if len(first) <= LONGEST else f"{first[: LONGEST - 1]}…"
