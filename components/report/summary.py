"""The run in a few plain lines, for a terminal."""

from __future__ import annotations

from steadytrain.components.report.facts import Facts, gather
from steadytrain.components.report.judging import interval
from steadytrain.components.report.spending import Spending
from steadytrain.components.report.story import attempts, executions, latest, outcome
from steadytrain.components.report.timing import wall_seconds
from steadytrain.components.report.words import duration, number
from steadytrain.components.shared.workspace import Workspace


def summary(workspace: Workspace) -> list[str]:
    """How the run ended, its steps, its scores, and the gate's sentence or the failure."""
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
    # A run that was continued and failed has the records of before.
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
    decided = facts.promotion or facts.gate
    if decided:
        lines.append(f"gate: {decided.reason}")
    return lines
