"""What an ablation found: the effect of each change, as a report and as lines of text."""

from __future__ import annotations

import json
import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Final

from markupsafe import Markup

from steadytrain.components.pages.charts import aligned
from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.config.tune import DESIGNS
from steadytrain.components.shared.quantities import number
from steadytrain.components.shared.storage import LocalStorage
from steadytrain.components.tune.comparisons import Estimate, Row, chart, estimates, row
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
class Effect:
    """What a change does to the score.

    pairs: by seed, the score with the change minus the score without it.
    estimate: None if no seed has both scores.
    better: whether the change improves the score; None if the study cannot tell, because Holm's
        p-value is above 1 - confidence.
    """

    comparison: Comparison
    pairs: Mapping[int, float]
    estimate: Estimate | None
    better: bool | None


def scores_of(study: Study) -> Scores:
    """Return the scores of the finished trials, with every variant."""
    design = Design(study.config)
    found: dict[Variant, dict[int, float]] = {variant: {} for variant in design.variants}
    for trial in study.history.trials:
        score = study.history.values(trial)[0]
        if trial.status == "finished" and math.isfinite(score):
            found[design.variant(trial)][trial.params[SEED]] = score
    return found


def effects_of(study: Study) -> list[Effect]:
    """Return the effect of each change in each design."""
    ablation, scores, sign = study.config.ablation, scores_of(study), signs(study)[0]
    compared = list(comparisons(ablation))
    pairs = [_pairs(scores, item) for item in compared]
    found = estimates([list(item.values()) for item in pairs], ablation.confidence)
    return [
        Effect(comparison, pair, estimate, _better(estimate, sign, 1 - ablation.confidence))
        for comparison, pair, estimate in zip(compared, pairs, found, strict=True)
    ]


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
                "mean": statistics.fmean(found.values()) if found else None,
                "scores": found,
            }
            for variant, found in scores.items()
        ],
        "effects": [_as_plain(effect) for effect in effects_of(study)],
        "trials": len(history.trials),
        "trials_failed": history.failed,
        "seconds": round(history.seconds, 3),
        "usd": study.usd(study.hours),
    }


def write_results(study: Study, folder: Path) -> None:
    """Write `effects.json`."""
    text = json.dumps(summary(study), indent=2)
    LocalStorage(folder).write(SUMMARY, f"{text}\n".encode())


def _pairs(scores: Scores, item: Comparison) -> dict[int, float]:
    changed, unchanged = scores[item.changed], scores[item.unchanged]
    return {seed: changed[seed] - unchanged[seed] for seed in changed if seed in unchanged}


def _better(estimate: Estimate | None, sign: float, level: float) -> bool | None:
    if estimate is None or estimate.p is None or estimate.p > level:
        return None
    return sign * estimate.mean < 0


def _as_plain(effect: Effect) -> dict[str, Any]:
    found = effect.estimate
    return {
        "design": effect.comparison.design,
        "change": effect.comparison.change,
        **(asdict(found) if found else dict.fromkeys(("mean", "low", "high", "p"))),
        "better": effect.better,
        "pairs": effect.pairs,
    }


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
                    number(fmean(found.values())) if found else "",
                    *(number(found.get(seed)) for seed in seeds),
                ],
            )
            for variant, found in scores_of(study).items()
        ],
    )


def _designs(effects: Sequence[Effect]) -> Iterator[tuple[str, str, Markup, list[Row]]]:
    for design in DESIGNS:
        found = [
            (effect.comparison.change, effect)
            for effect in effects
            if effect.comparison.design == design
        ]
        if found:
            title = design.replace("_", " ").capitalize()
            yield title, _EXPLAINED[design], chart(title, found), [row(*item) for item in found]


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
    found, objective = variants(ablation), config.tune.objective
    return [
        f"ablation    {study_name(config)}",
        f"objective   {objective.direction} {objective.metric}",
        f"designs     {', '.join(design.replace('_', ' ') for design in ablation.designs)}: "
        f"{len(list(comparisons(ablation)))} comparisons",
        f"trials      {budget.trials:,}: {len(found)} variants on {ablation.seeds} seeds, "
        f"{budget.parallel} at a time",
        f"steps       {UNKNOWN if steps is None else f'{steps:,}'}",
        *(f"variant     {variant_name(item, len(ablation.changes))}" for item in found),
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
