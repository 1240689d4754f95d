"""Summarize the run in a few plain lines, for a terminal."""

from __future__ import annotations

from steadytrain.components.report.evaluation import interval
from steadytrain.components.report.facts import Facts, gather
from steadytrain.components.report.spending import Spending
from steadytrain.components.report.story import attempts, executions, latest, outcome
from steadytrain.components.report.timing import wall_seconds
from steadytrain.components.report.words import duration, number
from steadytrain.components.shared.workspace import Workspace


def summary(workspace: Workspace) -> list[str]:
    """Return how the run ended, its steps, attempts, time and cost, and its results or failure."""
    facts = gather(workspace)
    standing = outcome(facts)
    lines = [standing.sentence]
    if standing.failure:
        lines.append(f"{standing.failure.error}: {standing.failure.message}")
        if standing.failure.remedy:
            lines.append(f"remedy: {standing.failure.remedy}")
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
