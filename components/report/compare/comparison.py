"""Two runs compared: what differs, what each has reached, and whether the difference is real."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from steadytrain.components.report.compare.side_by_side import (
    Row,
    differences,
    origin_differences,
    results,
    tokens,
    unrecorded,
)
from steadytrain.components.report.compare.verdict import Verdict, judge
from steadytrain.components.report.facts import Facts
from steadytrain.components.report.figures import standing
from steadytrain.components.report.spending import Spending
from steadytrain.components.report.story import outcome
from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.events.types import TrainingStep, Validated
from steadytrain.components.shared.quantities import number


@dataclass(frozen=True)
class Comparison:
    """Two runs side by side.

    facts: of the first and of the second run.
    differences: what differs, by section, as rows of a name and its value in each run.
    unrecorded: sections that at least one run's folder says nothing about.
    results: rows of what each run has reached; "" stands for what is unknown.
    """

    facts: tuple[Facts, Facts]
    differences: dict[str, Sequence[Row]]
    unrecorded: Sequence[str]
    results: Sequence[Row]
    verdict: Verdict

    @property
    def runs(self) -> list[str]:
        return [item.workspace.run_id for item in self.facts]

    @property
    def damaged(self) -> list[str]:
        return [problem for item in self.facts for problem in item.unreadable]

    def steps(self) -> list[tuple[str, list[int], list[list[float | None]]]]:
        """Return each validation metric and the training loss as name, steps, and values by run.

        The steps of the training loss are those that both runs logged.
        """
        scores = [
            {event.step: event.metrics for event in standing(item.of(Validated))}
            for item in self.facts
        ]
        names = dict.fromkeys(
            name for run in scores for metrics in run.values() for name in metrics
        )
        found = []
        for name in names:
            by_run = [
                {step: metrics[name] for step, metrics in run.items() if name in metrics}
                for run in scores
            ]
            found.append(_aligned(f"validation {name}", by_run, sorted({*by_run[0], *by_run[1]})))
        losses = [
            {event.step: event.loss for event in standing(item.of(TrainingStep))}
            for item in self.facts
        ]
        found.append(_aligned("training loss", losses, sorted({*losses[0]} & {*losses[1]})))
        return [item for item in found if item[1]]

    def tests(self) -> list[Row]:
        """Return rows of each paired metric: both values, difference, interval, the better run."""
        return [
            (
                name,
                [
                    *map(number, found.values),
                    number(found.difference.value),
                    f"{number(found.difference.low)} to {number(found.difference.high)}",
                    "" if found.better is None else self.runs[found.better],
                ],
            )
            for name, found in self.verdict.by_metric.items()
        ]

    def as_data(self) -> dict[str, Any]:
        """Return the comparison for programs. A value that is not finite or not known is None."""
        verdict = self.verdict
        return {
            "runs": self.runs,
            "states": [outcome(item).state for item in self.facts],
            "differences": {
                section: {name: list(values) for name, values in rows}
                for section, rows in self.differences.items()
            },
            "unrecorded": list(self.unrecorded),
            "steps": {
                name: {"step": steps, "values": [_finite(one) for one in values]}
                for name, steps, values in self.steps()
            },
            "training_seconds": [Spending.of(item).times.wall for item in self.facts],
            "tokens": [tokens(item) for item in self.facts],
            "usd": [Spending.of(item).metrics().get("cost_usd") for item in self.facts],
            "test": {
                name: {
                    "values": _finite(found.values),
                    "difference": _finite([found.difference.value])[0],
                    "interval": _finite([found.difference.low, found.difference.high]),
                    "better": None if found.better is None else self.runs[found.better],
                }
                for name, found in verdict.by_metric.items()
            },
            "metric": verdict.metric or None,
            "better": verdict.better,
            "confidence": verdict.confidence or None,
            "verdict": verdict.sentence,
            "damaged": self.damaged,
        }


def compare(first: Facts, second: Facts, config: RunConfig) -> Comparison:
    """Compare two runs.

    Args:
        config: the first run's configuration, which says how to resample the test examples.
    """
    facts = first, second
    missing = {name for item in facts for name in unrecorded(item)}
    return Comparison(
        facts,
        {"configuration": differences(facts), **origin_differences(facts)},
        sorted(missing),
        results(facts, [outcome(item).state for item in facts]),
        judge(first, second, config),
    )


def _aligned(
    name: str, by_run: Sequence[dict[int, float]], steps: list[int]
) -> tuple[str, list[int], list[list[float | None]]]:
    return name, steps, [[values.get(step) for step in steps] for values in by_run]


def _finite(values: Sequence[float | None]) -> list[float | None]:
    return [value if value is not None and math.isfinite(value) else None for value in values]
