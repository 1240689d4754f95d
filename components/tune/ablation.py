"""What an ablation found: the effect of each change, as a report and as lines of text.

The confidence intervals and p-values of means and differences hold for all of them together, also
those of a cross-validation. The intervals are Student's t intervals at the level that Bonferroni's
inequality gives for several comparisons (Dunn 1961, "Multiple Comparisons Among Means"). The
p-values of the t tests are adjusted by Holm's step-down method (Holm 1979, "A Simple Sequentially
Rejective Multiple Test Procedure"). Both hold however the comparisons depend on each other, as they
do if they share a variant. Holm's method is the stronger one: it may find an effect whose interval
still contains 0.

The training sets of a cross-validation overlap, so its scores vary together, and their standard
error is larger than that of independent ones. Nadeau and Bengio (2003, "Inference for the
Generalization Error") correct for it: variance x (1/n + tested/trained).
"""

from __future__ import annotations

import json
import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import fmean
from typing import Any, Final

from markupsafe import Markup

from steadytrain.components.pages.charts import aligned, intervals
from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.config.tune import DESIGNS
from steadytrain.components.shared.quantities import number
from steadytrain.components.shared.storage import LocalStorage
from steadytrain.components.tune.designs import (
    SEED,
    Comparison,
    Design,
    Variant,
    comparisons,
    variant_name,
    variants,
)
from steadytrain.components.tune.history import Trial
from steadytrain.components.tune.results import UNKNOWN, signs, spent
from steadytrain.components.tune.study import Study, study_name
from steadytrain.components.tune.study_page import study_html, time_tile

SUMMARY: Final = "effects.json"
Scores = Mapping[Variant, Mapping[int, float]]
"""The score of each variant by seed."""


@dataclass(frozen=True)
class Compared:
    """What a change or another configuration does to a score.

    pairs: by seed or fold, the score with it minus the score without it.
    estimate: None if no seed or fold has both scores.
    better: whether it improves the score; None if the study cannot tell, because Holm's p-value
        over all that is compared is above 1 - confidence.
    """

    pairs: Mapping[int, float]
    estimate: Estimate | None
    better: bool | None

    def as_plain(self, **names: str) -> dict[str, Any]:
        """Return it for programs, after the names of what is compared."""
        estimate = asdict(self.estimate) if self.estimate else _NO_ESTIMATE
        return {**names, **estimate, "better": self.better, "pairs": self.pairs}


@dataclass(frozen=True)
class Effect(Compared):
    """What a change does to the score."""

    comparison: Comparison


def scores_of(study: Study) -> Scores:
    """Return the scores of the finished trials, with every variant."""
    design = Design(study.config)
    scores: dict[Variant, dict[int, float]] = {variant: {} for variant in design.variants}
    for trial in study.history.trials:
        score = study.history.values(trial)[0]
        if trial.status == "finished" and math.isfinite(score):
            scores[design.variant(trial)][trial.params[SEED]] = score
    return scores


def effects_of(study: Study) -> list[Effect]:
    """Return the effect of each change in each design."""
    ablation, scores = study.config.ablation, scores_of(study)
    items = list(comparisons(ablation))
    scored = [(scores[item.changed], scores[item.unchanged]) for item in items]
    found = compared(scored, ablation.confidence, greater_is_better=signs(study)[0] < 0)
    return [Effect(*result, item) for result, item in zip(found, items, strict=True)]


def summary(study: Study) -> dict[str, Any]:
    """Return what an ablation found, for programs."""
    scores, history = scores_of(study), study.history
    return {
        "study": study_name(study.config),
        "objective": study.tune.objective.model_dump(),
        "confidence": study.config.ablation.confidence,
        "variants": [
            {
                "changes": list(variant),
                "mean": statistics.fmean(result.values()) if result else None,
                "scores": result,
            }
            for variant, result in scores.items()
        ],
        "effects": [
            effect.as_plain(design=effect.comparison.design, change=effect.comparison.change)
            for effect in effects_of(study)
        ],
        "trials": len(history.trials),
        "trials_failed": history.failed,
        "seconds": round(history.seconds, 3),
        "usd": study.usd(study.hours),
    }


def write_results(study: Study, folder: Path) -> None:
    """Write `effects.json`."""
    text = json.dumps(summary(study), indent=2)
    LocalStorage(folder).write(SUMMARY, f"{text}\n".encode())


_EXPLAINED: Final = {
    "leave_one_out": "What a change contributes when all others are present: all changes, compared "
    "with all but this one.",
    "one_at_a_time": "What a change does by itself: the configuration with it, compared with the "
    "configuration as it is.",
}


def render(study: Study) -> str:
    """Return the report as HTML."""
    ablation, objective, effects = study.config.ablation, study.tune.objective, effects_of(study)
    first, changes, history = study.config.training.seed, len(ablation.changes), study.history
    seeds = range(first, first + ablation.seeds)
    better = Counter(effect.better for effect in effects)
    trials = f"{len(history.trials):,} of {study.tune.budget.trials:,}"
    return study_html(
        "ablation",
        study,
        metric=objective.metric,
        direction="lower" if objective.direction == "minimize" else "higher",
        sentence=f"Of {len(effects)} comparisons, the change is better in {better[True]}, worse in "
        f"{better[False]}, and {better[None]} are not decided.",
        tiles=[
            ("Trials", trials, f"{history.failed:,} failed"),
            ("Steps", f"{study.steps:,}", ""),
            time_tile(study),
        ],
        designs=list(_designs(effects)),
        confidence=f"{ablation.confidence:.4g}",
        seeds=[f"seed {seed}" for seed in seeds],
        variants=[
            (
                variant_name(variant, changes),
                [
                    number(fmean(scores.values())) if scores else "",
                    *(number(scores.get(seed)) for seed in seeds),
                ],
            )
            for variant, scores in scores_of(study).items()
        ],
    )


def _designs(effects: Sequence[Effect]) -> Iterator[tuple[str, str, Markup, list[Row]]]:
    for design in DESIGNS:
        designs = [
            (effect.comparison.change, effect)
            for effect in effects
            if effect.comparison.design == design
        ]
        if designs:
            title = design.replace("_", " ").capitalize()
            yield title, _EXPLAINED[design], chart(title, designs), [row(*item) for item in designs]


_HEADER = ("change", "difference", "interval", "p (Holm)", "seeds", "verdict")


def words(config: RunConfig) -> Callable[[Trial], str]:
    """Return what describes a trial: its variant and its seed."""
    design, changes = Design(config), len(config.ablation.changes)

    def describe(trial: Trial) -> str:
        return f"{variant_name(design.variant(trial), changes)}, seed {trial.params[SEED]}"

    return describe


def outline(config: RunConfig, steps: int | None) -> list[str]:
    """Return lines on what an ablation would do, for `--dry-run`.

    Args:
        steps: optimizer steps of all trials together; None if they are not known yet.
    """
    ablation, budget = config.ablation, config.tune.budget
    compared, objective = variants(ablation), config.tune.objective
    return [
        f"ablation    {study_name(config)}",
        f"objective   {objective.direction} {objective.metric}",
        f"designs     {', '.join(design.replace('_', ' ') for design in ablation.designs)}: "
        f"{len(list(comparisons(ablation)))} comparisons",
        f"trials      {budget.trials:,}: {len(compared)} variants on {ablation.seeds} seeds, "
        f"{budget.parallel} at a time",
        f"steps       {UNKNOWN if steps is None else f'{steps:,}'}",
        *(f"variant     {variant_name(item, len(ablation.changes))}" for item in compared),
    ]


def ending(study: Study) -> list[str]:
    """Return lines on what an ablation found."""
    total = f"{len(study.history.trials):,} of {study.tune.budget.trials:,}"
    return ["", f"trials  {total}, {spent(study)}", *_tables(study)]


def _tables(study: Study) -> Iterator[str]:
    effects = effects_of(study)
    for design in DESIGNS:
        rows = [
            (name, *cells)
            for item in effects
            if item.comparison.design == design
            for name, cells in [row(item.comparison.change, item)]
        ]
        if rows:
            yield from ("", f"{design.replace('_', ' ')}: {study.tune.objective.metric}")
            yield from aligned([_HEADER, *rows])
    confidence = study.config.ablation.confidence
    yield f"The intervals hold together with a probability of {confidence:.4g}."


@dataclass(frozen=True)
class Estimate:
    """The mean of paired differences.

    low, high: ends of the simultaneous confidence interval; None for fewer than two pairs.
    p: Holm's adjusted p-value for "there is no difference"; None for fewer than two pairs.
    """

    mean: float
    low: float | None
    high: float | None
    p: float | None


_NO_ESTIMATE: Final = dict.fromkeys(item.name for item in fields(Estimate))


def compared(
    scores: Iterable[tuple[Mapping[int, float], Mapping[int, float]]],
    confidence: float,
    *,
    greater_is_better: bool,
    overlap: float = 0.0,
) -> Iterator[tuple[Mapping[int, float], Estimate | None, bool | None]]:
    """Yield the fields of `Compared` for each pair of scores, with the change and without it.

    Args:
        confidence, overlap: as for `estimates`.
    """
    pairs = [
        {key: score - others[key] for key, score in own.items() if key in others}
        for own, others in scores
    ]
    made = estimates([list(item.values()) for item in pairs], confidence, overlap=overlap)
    for pair, estimate in zip(pairs, made, strict=True):
        better = None
        if estimate and estimate.p is not None and estimate.p <= 1 - confidence:
            better = (estimate.mean if greater_is_better else -estimate.mean) > 0
        yield pair, estimate, better


def estimates(
    differences: Sequence[Sequence[float]], confidence: float, *, overlap: float = 0.0
) -> list[Estimate | None]:
    """Return the estimate of each comparison; None for one without a pair.

    Args:
        differences: for each comparison its differences, one per seed.
        confidence: probability with which all intervals together contain the true means.
        overlap: records tested on over records trained on, if these were parts of the same records;
            0 for independent differences.
    """
    usable = [values for values in differences if len(values) > 1]
    adjusted = iter(holm([_p(values, overlap) for values in usable]))
    made = list[Estimate | None]()
    for values in differences:
        mean = statistics.fmean(values) if values else math.nan
        if len(values) > 1:
            half = _half_width(values, confidence, len(differences), overlap)
            made.append(Estimate(mean, mean - half, mean + half, next(adjusted)))
        else:
            made.append(Estimate(mean, None, None, None) if values else None)
    return made


def holm(values: Sequence[float]) -> list[float]:
    """Return p-values adjusted by Holm's method, in the same order."""
    adjusted, largest = [0.0] * len(values), 0.0
    order = sorted(range(len(values)), key=values.__getitem__)
    for smaller, index in enumerate(order):
        largest = max(largest, min(1.0, (len(values) - smaller) * values[index]))
        adjusted[index] = largest
    return adjusted


def _half_width(
    differences: Sequence[float], confidence: float, comparisons: int, overlap: float
) -> float:
    # scipy takes half a second to import.
    from scipy.stats import t

    tail = (1 - confidence) / (2 * comparisons)
    return float(t.isf(tail, len(differences) - 1)) * _error(differences, overlap)


def _p(differences: Sequence[float], overlap: float) -> float:
    from scipy.stats import t

    mean, error = statistics.fmean(differences), _error(differences, overlap)
    if error == 0:
        return 0.0 if mean else 1.0
    return float(2 * t.sf(abs(mean) / error, len(differences) - 1))


def _error(differences: Sequence[float], overlap: float) -> float:
    """Return the standard error of the mean."""
    return statistics.stdev(differences) * math.sqrt(1 / len(differences) + overlap)


_VERDICTS: Final = {True: "better", False: "worse", None: "not decided"}
_KINDS: Final = {True: "best", False: "failed", None: "stopped"}
Row = tuple[str, list[str]]
"""A name, and what belongs to it in words."""


def row(name: str, item: Compared) -> Row:
    """Return a comparison in words: difference, interval, p, number of pairs, and verdict."""
    estimate, p = item.estimate, ""
    if estimate and estimate.p is not None:
        p = "<0.001" if estimate.p < 1e-3 else f"{estimate.p:.3f}"
    difference = _signed(estimate.mean) if estimate else ""
    ends = interval(estimate, _signed) if estimate else ""
    return name, [difference, ends, p, str(len(item.pairs)), _VERDICTS[item.better]]


def chart(title: str, items: Iterable[tuple[str, Compared]]) -> Markup:
    """Draw the interval of each comparison that has one."""
    rows = [
        (name, estimate.low, estimate.mean, estimate.high, _KINDS[item.better])
        for name, item in items
        if (estimate := item.estimate) and estimate.low is not None and estimate.high is not None
    ]
    return intervals(title, rows)


def interval(estimate: Estimate, show: Callable[[float], str] = number) -> str:
    """Return an interval in words; "" if there is none."""
    if estimate.low is None or estimate.high is None:
        return ""
    return f"{show(estimate.low)} to {show(estimate.high)}"


def _signed(value: float) -> str:
    return f"+{number(value)}" if value > 0 else number(value)
