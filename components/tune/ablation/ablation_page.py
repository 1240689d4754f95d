"""An ablation's report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import Final

from markupsafe import Markup

from steadytrain.components.shared.config.ablation import DESIGNS
from steadytrain.components.shared.quantities import number
from steadytrain.components.tune.ablation.effects import Effect, effects_of, scores_of
from steadytrain.components.tune.compared import Row, chart, row
from steadytrain.components.tune.design import variant_name
from steadytrain.components.tune.study import Study
from steadytrain.components.tune.study_page import study_html, time_tile

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
