"""Whether one of two models is better on the test side, by the scores that both runs stored."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from steadytrain.components.report.facts import Facts
from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.errors import SteadytrainError
from steadytrain.components.shared.quantities import number
from steadytrain.components.shared.records import EvaluationRecord

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
