"""Two runs compared: what differs, what each has reached, and whether the difference is real.

The rows that show results and configurations side by side take any number of runs.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from steadytrain.components.pages.charts import aligned, thin
from steadytrain.components.pages.html import html
from steadytrain.components.report.facts import Facts, Spending
from steadytrain.components.report.figures import compared_figures, memory, without_repeats
from steadytrain.components.report.story import attempts, outcome
from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.errors import SteadytrainError
from steadytrain.components.shared.events.types import (
    AttemptStarted,
    StepStarted,
    TrainingStarted,
    TrainingStep,
    Validated,
    newest_attempt,
)
from steadytrain.components.shared.quantities import duration, number, percent, size
from steadytrain.components.shared.records import EvaluationRecord
from steadytrain.components.shared.redaction import on_one_line

if TYPE_CHECKING:
    from steadytrain.components.evaluate.metric import Scores
    from steadytrain.components.evaluate.paired import PairedDifference


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
    result = paired_differences(
        one, other, shared, confidence=confidence, min_units=config.gate.min_units
    )
    if not result:
        return Verdict("The models cannot be compared: they share no metric of the same text.")
    preferred = (config.gate.metric, one.metric, *result)
    metric = next(name for name in preferred if name in result)
    runs = first.workspace.run_id, second.workspace.run_id
    difference = result[metric]
    better = None if difference.better is None else runs[difference.better]
    return Verdict(
        _sentence(metric, difference, better, confidence, len(one.id)),
        metric,
        better,
        confidence,
        len(one.id),
        result,
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
        rows = []
        for name in names:
            by_run = [
                {step: metrics[name] for step, metrics in run.items() if name in metrics}
                for run in scores
            ]
            rows.append(_aligned(f"validation {name}", by_run, sorted({*by_run[0], *by_run[1]})))
        losses = [
            {event.step: event.loss for event in without_repeats(item.of(TrainingStep))}
            for item in self.facts
        ]
        rows.append(_aligned("training loss", losses, sorted({*losses[0]} & {*losses[1]})))
        return [item for item in rows if item[1]]

    def tests(self) -> list[Row]:
        """Return rows of each paired metric: both values, difference, interval, the better run."""
        return [
            (
                name,
                [
                    *map(number, difference.values),
                    number(difference.difference.value),
                    f"{number(difference.difference.low)} to {number(difference.difference.high)}",
                    "" if difference.better is None else self.runs[difference.better],
                ],
            )
            for name, difference in self.verdict.by_metric.items()
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
                    "values": _finite(difference.values),
                    "difference": _finite([difference.difference.value])[0],
                    "interval": _finite([difference.difference.low, difference.difference.high]),
                    "better": None if difference.better is None else self.runs[difference.better],
                }
                for name, difference in verdict.by_metric.items()
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


_OF_EVERY_RUN: Final = {"run", "output"}
"""Fields that always differ, and say nothing."""


Row = tuple[str, Sequence[str]]
"""A name and its value in each run."""


def results(facts: Sequence[Facts], states: Sequence[str]) -> list[Row]:
    """Return what each run has reached; "" stands for what is unknown.

    Args:
        states: the state of each run.
    """
    columns = [
        {"State": state, **dict(_results(item))} for item, state in zip(facts, states, strict=True)
    ]
    names = dict.fromkeys(name for column in columns for name in column)
    return [(name, [column.get(name, "") for column in columns]) for name in names]


def differences(facts: Sequence[Facts]) -> list[Row]:
    """Return the fields of the configuration that are not the same in all runs."""
    flat = [
        {name: text for name, text in leaves(item.config) if name not in _OF_EVERY_RUN}
        for item in facts
    ]
    return differing(flat)


def differing(runs: Sequence[Mapping[str, str]]) -> list[Row]:
    """Return rows of a name and its value in each run, without those that are the same."""
    names = sorted({name for fields in runs for name in fields})
    rows: list[Row] = [(name, [fields.get(name, "(not set)") for fields in runs]) for name in names]
    return [(name, values) for name, values in rows if len(set(values)) > 1]


def leaves(content: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, str]]:
    """Yield each field by its dotted name, with its value as text."""
    for name, value in content.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{before}{name}.")
        else:
            yield f"{before}{name}", value if isinstance(value, str) else _text(value)


def _text(value: Any) -> str:
    try:
        return json.dumps(value)
    except ValueError:
        return "a number that is too long to show"


def tokens(facts: Facts) -> int:
    """Return how many tokens all attempts have processed, including those of repeated steps."""
    return sum({event.attempt: event.tokens for event in facts.of(TrainingStep)}.values())


def _results(facts: Facts) -> Iterator[tuple[str, str]]:
    if steps := facts.of(TrainingStep):
        yield "Step", number(steps[-1].step)
        yield "Training loss", number(steps[-1].loss)
        yield "Tokens", number(tokens(facts))
        yield "Tokens per second", number(round(steps[-1].tokens_per_second))
        yield "Memory of rank 0", size(memory(steps[-1]))
    if scores := facts.of(Validated):
        best = next((event for event in reversed(scores) if event.best), scores[-1])
        for name, score in best.metrics.items():
            yield f"Best validation: {name}", number(score)
    if facts.evaluation:
        for name, metric in facts.evaluation.metrics.items():
            yield f"Test {name}", number(metric.value)
    if tried := attempts(facts):
        yield "Attempts", number(len(tried))
    spending = Spending.of(facts)
    if spending.times.wall:
        yield "Training time", duration(spending.times.wall)
        yield "Goodput", percent(spending.times.goodput)
    if spending.price_per_hour is not None:
        yield "Cost", f"{spending.times.cost(spending.price_per_hour):,.2f} USD"


Origin = Mapping[str, Mapping[str, str]]
"""By section, then by name."""
SECTIONS: Final = ("data", "code", "environment", "hardware")


def origin_differences(facts: Sequence[Facts]) -> dict[str, list[Row]]:
    """Return what differs in each section, as rows of a name and its value in each run."""
    origins = [origin(item) for item in facts]
    return {name: differing([item[name] for item in origins]) for name in SECTIONS}


def unrecorded(facts: Facts) -> list[str]:
    """Return the sections that the run's folder says nothing about."""
    missing = origin(facts)
    return [name for name in SECTIONS if not missing[name]]


def origin(facts: Facts) -> Origin:
    """Return what the newest attempt was made from."""
    return dict(
        zip(SECTIONS, (_data(facts), _code(facts), _packages(facts), _hardware(facts)), strict=True)
    )


def _data(facts: Facts) -> dict[str, str]:
    data = facts.data
    if data is None:
        return {}
    about = {
        "fingerprint": data.fingerprint,
        "input": data.inputs_digest,
        "split": data.split_digest,
        "task": data.task,
        "labels": ", ".join(data.labels),
        **{
            f"{name} {what}": f"{getattr(side, what):,}"
            for name, side in sorted(data.sides.items())
            for what in ("documents", "tokens")
        },
    }
    return {name: value for name, value in about.items() if value}


def _code(facts: Facts) -> dict[str, str]:
    """Return the digest of steadytrain's code, and where the user's own code comes from."""
    code = {"steadytrain": _versions(facts).get("code", "")}
    attempts = facts.of(AttemptStarted)
    code |= attempts[-1].code if attempts else {}
    return {name.rpartition("steadytrain.")[2]: value for name, value in code.items() if value}


def _packages(facts: Facts) -> dict[str, str]:
    """Return versions: of the train step's process, and those of its ranks, which win."""
    packages = {name: value for name, value in _versions(facts).items() if name != "code"}
    ranks = [event.environment for event in facts.of(TrainingStarted) if event.environment]
    return packages | (ranks[-1] if ranks else {})


def _versions(facts: Facts) -> dict[str, str]:
    started = [event for event in facts.of(StepStarted) if event.environment]
    trained = [event for event in started if event.stage == "train"]
    return (trained or started)[-1].environment if started else {}


def _hardware(facts: Facts) -> dict[str, str]:
    """Return the devices of the newest attempt and how the work was divided among them."""
    newest, started = newest_attempt(facts.events), facts.of(TrainingStarted)
    result: dict[str, str] = {}
    if started:
        result |= {"device": started[-1].device, "precision": started[-1].precision}
    if newest is not None:
        batch = newest.batch.micro_batch_size, newest.gradient_accumulation_steps, newest.world_size
        result |= {
            "nodes": str(newest.nodes),
            "micro-batch x accumulation x world size": " x ".join(map(str, batch)),
        }
    return result
