"""Two runs compared: what differs, what each has reached, and whether the difference is real."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from steadytrain.components.pages.charts import aligned, thin
from steadytrain.components.pages.html import html
from steadytrain.components.report.facts import Facts, Spending
from steadytrain.components.report.figures import compared_figures, without_repeats
from steadytrain.components.report.side_by_side import (
    Row,
    differences,
    origin_differences,
    results,
    tokens,
    unrecorded,
)
from steadytrain.components.report.story import outcome
from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.errors import SteadytrainError
from steadytrain.components.shared.events.types import TrainingStep, Validated
from steadytrain.components.shared.quantities import number
from steadytrain.components.shared.records import EvaluationRecord
from steadytrain.components.shared.redaction import on_one_line

if TYPE_CHECKING:
    from steadytrain.components.evaluate.paired import PairedDifference
    from steadytrain.components.evaluate.scores import Scores


@dataclass(frozen=True)
class Verdict:
    """A paired comparison of two models.

    sentence: which model is better, or why that is unknown.
    metric: the metric of the sentence; "" if the models were not compared.
    better: the name of the better run; None if no difference was found.
    confidence: level of the intervals.
    examples: number of test examples.
    by_metric: the difference in every metric that both runs have.
    """

    sentence: str
    metric: str = ""
    better: str | None = None
    confidence: float = 0.0
    examples: int = 0
    by_metric: Mapping[str, PairedDifference] = field(default_factory=dict)


def judge(first: Facts, second: Facts, config: RunConfig) -> Verdict:
    """Compare the models of two runs on the same examples, or say why that is impossible.

    Args:
        config: the configuration with the level of the intervals.
    """
    reason = _incomparable(first, second)
    if reason:
        return Verdict(f"The models cannot be compared: {reason}.")
    try:
        # A light install has no pyarrow, NumPy and SciPy. Nothing else here needs them.
        import_module("scipy.special")
        from steadytrain.components.evaluate.paired import read_scores, unpaired
    except ModuleNotFoundError as error:
        return Verdict(
            f"The models cannot be compared: the package {error.name} is not installed "
            "(pip install 'steadytrain[train]')."
        )
    try:
        one, other = (read_scores(Path(_evaluation(facts).scores)) for facts in (first, second))
        reason = unpaired(one, other)
        if reason:
            return Verdict(f"The models cannot be compared: {reason}.")
        return _verdict(first, second, one, other, config)
    except SteadytrainError as error:
        return Verdict(f"The models cannot be compared: {error.message}; {error.remedy}.")


def _incomparable(first: Facts, second: Facts) -> str:
    """Return why the records of the runs rule out a comparison, or ""."""
    splits: set[str] = set()
    labels: list[list[str]] = []
    for facts in (first, second):
        run, evaluated, trained = facts.workspace.run_id, facts.evaluation, facts.training
        if evaluated is None or not evaluated.scores:
            return f"{run} has no scores on the test side"
        if trained is not None and trained.weights_digest != evaluated.weights_digest:
            return f"the scores of {run} are of an earlier model; run its evaluate step again"
    if _evaluation(first).weights_digest == _evaluation(second).weights_digest:
        return "both runs have the same weights"
    if _evaluation(first).task != _evaluation(second).task:
        return "they are for different tasks"
    for facts in (first, second):
        if facts.data is None:
            return f"{facts.workspace.run_id} has no record of its data"
        splits |= {facts.data.split_digest, *_evaluation(facts).splits}
        labels.append(facts.data.labels)
    if len(splits) > 1:
        return (
            "a model, or one that it started from, was trained on another split, so it may have "
            "seen the test records"
        )
    if labels[0] != labels[1]:
        return "they have different labels"
    return ""


def _verdict(first: Facts, second: Facts, one: Scores, other: Scores, config: RunConfig) -> Verdict:
    from steadytrain.components.evaluate.paired import paired_differences

    shared = [name for name in _evaluation(first).metrics if name in _evaluation(second).metrics]
    confidence = config.evaluation.confidence
    found = paired_differences(
        one, other, shared, confidence=confidence, min_units=config.gate.min_units
    )
    if not found:
        return Verdict("The models cannot be compared: they share no metric of the same text.")
    preferred = (config.gate.metric, one.metric, *found)
    metric = next(name for name in preferred if name in found)
    runs = first.workspace.run_id, second.workspace.run_id
    difference = found[metric]
    better = None if difference.better is None else runs[difference.better]
    return Verdict(
        _sentence(metric, difference, better, confidence, len(one.id)),
        metric,
        better,
        confidence,
        len(one.id),
        found,
    )


def _sentence(
    metric: str, found: PairedDifference, better: str | None, confidence: float, examples: int
) -> str:
    name, values = metric.replace("_", " "), " and ".join(map(number, found.values))
    interval = found.difference
    basis = f"{number(examples)} test examples"
    if math.isnan(interval.low):
        return f"Unknown: {basis} are too few, or a model has no finite {name} ({values})."
    level = f"{100 * confidence:g} % interval {number(interval.low)} to {number(interval.high)}"
    difference = f"{name} {values}, difference {number(interval.value)} ({level}, {basis})"
    if better is None:
        return f"No real difference: {difference}. The interval includes 0."
    return f"{better} is better: {difference}."


def _evaluation(facts: Facts) -> EvaluationRecord:
    assert facts.evaluation is not None
    return facts.evaluation


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
            {event.step: event.metrics for event in without_repeats(item.of(Validated))}
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
            {event.step: event.loss for event in without_repeats(item.of(TrainingStep))}
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


STEPS: Final = 12
"""Steps of a curve that are shown at most. The page and `--json` have more."""
WIDEST: Final = 60
"""Longest name or value. Longer ones are cut."""


def lines(comparison: Comparison) -> Iterator[str]:
    """Yield the verdict, what differs, what each run has reached, and its curves."""
    runs = comparison.runs
    yield comparison.verdict.sentence
    for problem in comparison.damaged:
        yield f"damaged: {problem}"
    same = []
    for section, rows in comparison.differences.items():
        if section in comparison.unrecorded:
            yield from ("", f"{section}: not recorded by every run")
        elif not rows:
            same.append(section)
            continue
        if rows:
            yield from ("", *_table(f"different {section}", runs, rows))
    if same:
        yield from ("", f"the same: {', '.join(same)}")
    yield from ("", *_table("results", runs, comparison.results))
    for name, steps, values in comparison.steps():
        shown = [index for index, _ in thin([(i, 0.0) for i in range(len(steps))], STEPS)]
        rows = [
            (number(steps[int(i)]), [number(column[int(i)]) for column in values]) for i in shown
        ]
        yield from ("", *_table(f"{name} by step", runs, rows))
    if tests := comparison.tests():
        level = f"{100 * comparison.verdict.confidence:g} % interval"
        columns = [*runs, "difference", level, "better"]
        yield from ("", *_table("test side", columns, tests))


def _table(title: str, columns: Sequence[str], rows: Sequence[Row]) -> Iterator[str]:
    """Return a heading and rows in aligned columns."""
    cells = [[title, *columns], *([f"  {name}", *values] for name, values in rows)]
    return aligned([[_short(cell) for cell in row] for row in cells])


def _short(text: str) -> str:
    clean = on_one_line(text)
    return clean if len(clean) <= WIDEST else f"{clean[: WIDEST - 1]}…"


def render(comparison: Comparison) -> str:
    """Return the page as HTML."""
    return html(
        "comparison",
        kind="compare",
        name=" and ".join(comparison.runs),
        runs=comparison.runs,
        verdict=comparison.verdict,
        differences=comparison.differences,
        unrecorded=comparison.unrecorded,
        results=comparison.results,
        figures=compared_figures(comparison.facts),
        tests=comparison.tests(),
        unreadable=comparison.damaged,
    )
