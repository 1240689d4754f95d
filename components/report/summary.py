"""Summarize the run in a few plain lines, for a terminal."""

from __future__ import annotations

from typing import Any

from steadytrain.components.pages.evaluation_section import interval
from steadytrain.components.report.explain import failure_as_data
from steadytrain.components.report.facts import Facts, gather
from steadytrain.components.report.spending import Spending
from steadytrain.components.report.story import attempts, executions, latest, outcome, wall_seconds
from steadytrain.components.shared.quantities import duration, number
from steadytrain.components.shared.workspace import Workspace


def summary(workspace: Workspace, *, running: bool = False) -> list[str]:
    """Return how the run ended, its steps, attempts, time and cost, and its results or failure.

    Args:
        running: as in `Facts`.
    """
    facts = gather(workspace, running=running)
    standing = outcome(facts)
    lines = [standing.sentence]
    if standing.failure:
        lines.append(f"{standing.failure.error}: {standing.failure.message}")
        if standing.failure.remedy:
            lines.append(f"fix: {standing.failure.remedy}")
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
    return lines if standing.failure else lines + _results(facts)


def as_data(workspace: Workspace, *, running: bool = False) -> dict[str, Any]:
    """Return the same for programs. None means that the run has not got that far."""
    facts = gather(workspace, running=running)
    standing, trained, scored = outcome(facts), facts.training, facts.evaluation
    decided = facts.promotion or facts.gate
    champion = facts.promotion or facts.registration
    return {
        "run": workspace.run_id,
        "state": standing.state,
        "summary": standing.sentence,
        "failure": failure_as_data(standing.failure),
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
