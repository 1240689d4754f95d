"""Explain or summarize a run in a few plain lines, for a terminal.

What the explanation advises works where it is printed: a run of a cluster is submitted again, a
local one is resumed. It has ten lines or fewer. Up to three more lines name damaged files, and up
to three more the problems that were found. One more says that a checkpoint was skipped, one
that memory ran out outside the training itself, one that gradients overflowed or were clipped, and
one what a person changed last.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from steadytrain.components.observe.diagnosis import findings
from steadytrain.components.pages.evaluation_section import interval
from steadytrain.components.report.facts import Facts, Spending, gather
from steadytrain.components.report.sentences import describe, recovery
from steadytrain.components.report.story import (
    FOLDS_STEP,
    SEARCH_STEP,
    TUNE_STEP,
    RunSummary,
    attempts,
    executions,
    latest,
    on_a_cluster,
    outcome,
    wall_seconds,
)
from steadytrain.components.shared.events.types import (
    BatchSplit,
    CheckpointSkipped,
    GradientOverflow,
)
from steadytrain.components.shared.quantities import duration, number, percent
from steadytrain.components.shared.redaction import on_one_line
from steadytrain.components.shared.workspace import Workspace
from steadytrain.components.train.recovery.history import History

RECOVERIES = 4
"""How many of the newest recoveries are shown. Earlier ones are only counted."""
DAMAGES = 3
"""How many unreadable files are listed. The report lists all of them."""
STUDIES = {TUNE_STEP: "tune", FOLDS_STEP: "cross-validate", SEARCH_STEP: "automl"}
"""The pipelines of the steps that drive a study."""
PROBLEMS = 3
"""How many problems of the training are listed. The report lists all of them."""
LONGEST = 300
_LONGEST_FAILURE = 1000
_KEPT_END = 120
"""Characters at the end of a message that is too long. It often ends with the cause."""


def explain(workspace: Workspace, *, running: bool = False) -> list[str]:
    """Return outcome, attempts, recoveries, checkpoint, times, problems, and what to do next."""
    facts = gather(workspace, running=running)
    run_summary = outcome(facts)
    lines = [run_summary.sentence]
    if run_summary.failure:
        message = f"{run_summary.failure.error}: {run_summary.failure.message}"
        lines.append(_short(message, _LONGEST_FAILURE))
    lines += [f"damaged: {problem}" for problem in facts.unreadable[:DAMAGES]]
    lines += facts.left_out[:DAMAGES]
    lines += _training(facts)
    lines += [text for texts in _notes(facts) for text in texts[-1:]]
    lines += [str(facts.nccl)] if facts.nccl else []
    diagnosed = findings(facts.events, facts.workspace.arguments)
    lines += map(str, diagnosed[:PROBLEMS])
    lines += [f"({len(diagnosed) - PROBLEMS} more problems)"] if len(diagnosed) > PROBLEMS else []
    lines.append(f"next: {_next(facts, run_summary)}")
    first, *others = lines
    kept = 1 if run_summary.failure else 0
    return [_short(first, _LONGEST_FAILURE), *others[:kept], *map(_short, others[kept:])]


def explanation_as_data(workspace: Workspace, *, running: bool = False) -> dict[str, Any]:
    """Return the same for programs. Times are seconds; None means unknown or not reached."""
    facts = gather(workspace, running=running)
    run_summary, history, times = outcome(facts), facts.history, Spending.of(facts).times
    return {
        "run": workspace.run_id,
        "state": run_summary.state,
        "summary": run_summary.sentence,
        "failure": run_summary.failure and run_summary.failure.as_plain(),
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
        "adjusted": [asdict(item) for item in history.adjusted],
        "shortened": history.shortened.reason if history.shortened else None,
        "checkpoint_step": history.last_step or None,
        "max_steps": history.planned_steps,
        "training_seconds": times.wall,
        "lost_seconds": times.lost,
        "goodput": times.goodput if times.wall else None,
        "notes": [
            *facts.left_out,
            *(text for texts in _notes(facts) for text in texts),
        ],
        "nccl": asdict(facts.nccl) if facts.nccl else None,
        "problems": [asdict(item) for item in findings(facts.events, facts.workspace.arguments)],
        "next": _next(facts, run_summary),
    }


def _notes(facts: Facts) -> Iterator[list[str]]:
    """Yield what the attempts do not show: the messages of each kind of event."""
    yield [event.message for event in facts.of(CheckpointSkipped)]
    yield [event.message for event in facts.of(BatchSplit)]
    overflows = facts.of(GradientOverflow)
    times = f"{len(overflows):,} x gradient_overflow"
    yield [f"{times}, last {describe(event).removeprefix('train: ')}" for event in overflows[-1:]]


def recoveries(history: History) -> list[str]:
    """Return a line for each repeated step and each failed attempt, with what was decided and why.

    Leave out a failure without a decision or a later attempt.
    """
    decided = {item.attempt: item for item in history.decisions if not item.in_place}
    lines = []
    for index, attempt in enumerate(history.attempts):
        number, ended, after = attempt.started.attempt, attempt.ended, history.attempts[index + 1 :]
        repeats = [item for item in history.decisions if item.in_place and item.attempt == number]
        lines += [describe(item).removeprefix("train: ") for item in repeats]
        decision = decided.get(number)
        if ended is None or not ended.failure_class or not (decision or after):
            continue
        step = after[0].started.resumed_from_step if after else history.last_step
        lines.append(recovery(ended, decision, step or 0))
    return lines


def _training(facts: Facts) -> Iterator[str]:
    history = facts.history
    if not history.attempts:
        yield _without_attempts(facts)
        return
    yield _attempts(history)
    if history.adjusted:
        *before, newest_change = history.adjusted
        more = f" ({len(before)} earlier changes)" if before else ""
        yield describe(newest_change).removeprefix("train: ") + more
    if history.shortened:
        yield f"sequences were shortened: {history.shortened.reason}"
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


def _without_attempts(facts: Facts) -> str:
    ran = {item.stage: item for item in latest(executions(facts.events))}
    if STUDIES.keys() & ran.keys():
        return "each trial trains in a run of its own"
    trained = ran.get("train")
    if trained and trained.state == "reused":
        return f"training was reused from run {trained.reused_from or facts.workspace.run_id}"
    return "training has not been attempted"


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


def _next(facts: Facts, run_summary: RunSummary) -> str:
    workspace, remote = facts.workspace, on_a_cluster(facts)
    arguments_path = workspace.arguments
    if run_summary.state in ("running", "pending"):
        how = f"`steadytrain stop {arguments_path}` stops it"
        if remote:
            how = "terminate it in Kubeflow Pipelines to stop it"
        return f"nothing: the run recovers by itself; {how}"
    if run_summary.state == "finished":
        return f"nothing; `steadytrain report {arguments_path}` shows the details"
    if run_summary.state == "resubmitted":
        return f"nothing: Kubeflow Pipelines run {run_summary.resubmitted_as} continues it"
    again = f"`{_submit_again(facts)}`" if remote else f"`steadytrain resume {arguments_path}`"
    if run_summary.failure and run_summary.failure.remedy:
        return f"{again}, after this fix: {' '.join(run_summary.failure.remedy.split())}"
    return again


def _submit_again(facts: Facts) -> str:
    """Return the command that continues a run of a cluster. Its configuration names its output."""
    ran = {item.stage for item in executions(facts.events)}
    pipeline = next((f" --pipeline {STUDIES[step]}" for step in STUDIES if step in ran), "")
    source = shlex.quote(str(facts.workspace.config))
    return f"steadytrain submit {source} --run {facts.workspace.run_id}{pipeline}"


def _short(line: str, longest: int = LONGEST) -> str:
    """Return the first line, without its middle if it is too long."""
    first = on_one_line(line.partition("\n")[0])
    if len(first) <= longest:
        return first
    return f"{first[: longest - _KEPT_END - 3]} … {first[-_KEPT_END:]}"


def summary(workspace: Workspace, *, running: bool = False) -> list[str]:
    """Return how the run ended, its steps, attempts, time and cost, and its results or failure.

    Args:
        running: as in `Facts`.
    """
    facts = gather(workspace, running=running)
    run_summary = outcome(facts)
    lines = [run_summary.sentence]
    if run_summary.failure:
        lines.append(f"{run_summary.failure.error}: {run_summary.failure.message}")
        if run_summary.failure.remedy:
            lines.append(f"fix: {run_summary.failure.remedy}")
    ran = executions(facts.events)
    if ran:
        steps = ", ".join(
            f"{item.stage} {item.state if item.state != 'finished' else duration(item.seconds)}"
            for item in latest(ran)
        )
        lines.append(f"steps: {steps}; {duration(wall_seconds(ran))} in all")
    tried = attempts(facts)
    if len(tried) > 1:
        lines.append("attempts: " + ", ".join(f"{item.number} {item.outcome}" for item in tried))
    lines += Spending.of(facts).lines()
    # If a run was resumed and failed, its records are from before.
    return lines if run_summary.failure else lines + _results(facts)


def summary_as_data(workspace: Workspace, *, running: bool = False) -> dict[str, Any]:
    """Return the same for programs. None means that the run has not got that far."""
    facts = gather(workspace, running=running)
    run_summary, trained, scored = outcome(facts), facts.training, facts.evaluation
    decided = facts.promotion or facts.gate
    champion = facts.promotion or facts.registration
    return {
        "run": workspace.run_id,
        "state": run_summary.state,
        "summary": run_summary.sentence,
        "failure": run_summary.failure and run_summary.failure.as_plain(),
        "steps": [
            {"step": item.stage, "state": item.state, "seconds": item.seconds}
            for item in latest(executions(facts.events))
        ],
        "attempts": len(attempts(facts)),
        "training": trained
        and {"metric": trained.metric, "best": trained.best_score, "step": trained.best_step},
        "test": scored and {name: metric.value for name, metric in scored.metrics.items()},
        "gate": decided
        and {"reason": decided.reason, "champion": bool(champion and champion.champion)},
        "report": str(workspace.report),
    }


def _results(facts: Facts) -> list[str]:
    lines = []
    if facts.training:
        best = facts.training
        lines.append(
            f"best validation {best.metric}: {number(best.best_score)} at step {best.best_step}"
            if best.validated
            else f"training loss of the last step, without a validation: {number(best.best_score)}"
        )
    if facts.evaluation:
        scores = ", ".join(
            f"{name} {number(metric.value)} ({interval(metric)})"
            for name, metric in facts.evaluation.metrics.items()
        )
        lines.append(f"test: {scores}")
        if facts.evaluation.tasks:
            reached = (
                f"{name} {number(score.value)}"
                + (f" ± {number(score.stderr, 2)}" if score.stderr is not None else "")
                for name, score in facts.evaluation.tasks.items()
            )
            lines.append(f"tasks: {', '.join(reached)}")
    decided = facts.promotion or facts.gate
    if decided:
        lines.append(f"gate: {decided.reason}")
    return lines
