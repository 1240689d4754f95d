"""An ablation's report: one HTML page that loads nothing from anywhere."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, Final

from markupsafe import Markup

from steadytrain.components.pages.charts import intervals
from steadytrain.components.shared.config.ablation import DESIGNS
from steadytrain.components.shared.quantities import duration, money, number
from steadytrain.components.shared.storage import LocalStorage
from steadytrain.components.tune.ablation.effects import Effect, effects_of, scores_of
from steadytrain.components.tune.ablation.table import row, variant_name
from steadytrain.components.tune.html import html
from steadytrain.components.tune.page import PAGE
from steadytrain.components.tune.study import Study, study_name

_EXPLAINED: Final = {
    "leave_one_out": "What a change contributes when all others are present: all changes, compared "
    "with all but this one.",
    "one_at_a_time": "What a change does by itself: the configuration with it, compared with the "
    "configuration as it is.",
}
_KINDS: Final = {True: "best", False: "failed", None: "stopped"}


def write_page(study: Study, folder: Path) -> None:
    """Write the report of an ablation to its folder."""
    LocalStorage(folder).write(PAGE, render(study).encode())


def render(study: Study) -> str:
    """Return the report as HTML."""
    ablation, objective, effects = study.config.ablation, study.tune.objective, effects_of(study)
    first, changes = study.config.training.seed, len(ablation.changes)
    seeds = range(first, first + ablation.seeds)
    return html(
        "ablation.html.j2",
        kind="ablation",
        name=study_name(study.config),
        metric=objective.metric,
        direction="lower" if objective.direction == "minimize" else "higher",
        sentence=_sentence(effects),
        tiles=_tiles(study),
        designs=list(_designs(effects)),
        confidence=f"{ablation.confidence:.4g}",
        seeds=seeds,
        variants=[
            (
                variant_name(variant, changes),
                number(fmean(found.values())) if found else "",
                [number(found.get(seed)) for seed in seeds],
            )
            for variant, found in scores_of(study).items()
        ],
        failures=Counter(item.failure for item in study.history.trials if item.failure),
        config_text=study.config.to_yaml(),
    )


def _designs(effects: Sequence[Effect]) -> Iterator[tuple[str, str, Markup, list[Any]]]:
    for design in DESIGNS:
        found = [effect for effect in effects if effect.comparison.design == design]
        if found:
            title = design.replace("_", " ").capitalize()
            yield title, _EXPLAINED[design], _chart(title, found), [row(item) for item in found]


def _chart(title: str, effects: Sequence[Effect]) -> Markup:
    rows = []
    for effect in effects:
        found = effect.estimate
        if found and found.low is not None and found.high is not None:
            kind = _KINDS[effect.better]
            rows.append((effect.comparison.change, found.low, found.mean, found.high, kind))
    return intervals(title, rows)


def _sentence(effects: Sequence[Effect]) -> str:
    counts = Counter(effect.better for effect in effects)
    return (
        f"Of {len(effects)} comparisons, the change is better in {counts[True]}, worse in "
        f"{counts[False]}, and {counts[None]} are not decided."
    )


def _tiles(study: Study) -> list[tuple[str, str, str]]:
    history, usd = study.history, study.usd(study.hours)
    trials = study.tune.budget.trials
    return [
        ("Trials", f"{len(history.trials):,} of {trials:,}", f"{history.failed:,} failed"),
        ("Steps", f"{study.steps:,}", ""),
        ("Training time", duration(history.seconds), money(usd) if usd is not None else ""),
    ]
