"""A cross-validation as lines of text."""

from __future__ import annotations

from collections.abc import Callable

from steadytrain.components.pages.text_table import aligned
from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.quantities import number
from steadytrain.components.tasks.registry import open_encoder
from steadytrain.components.tune.compared import interval, row
from steadytrain.components.tune.cross_validation.fold_sizes import FoldSizes
from steadytrain.components.tune.cross_validation.results import Results
from steadytrain.components.tune.display import spent
from steadytrain.components.tune.fold_design import FoldDesign, configurations
from steadytrain.components.tune.history import Trial
from steadytrain.components.tune.steps import UNKNOWN
from steadytrain.components.tune.study import Study, study_name


def words(config: RunConfig) -> Callable[[Trial], str]:
    """Return what describes a trial: its configuration and its fold."""
    design = FoldDesign(config)
    return lambda trial: f"{design.configuration(trial)}, fold {design.fold(trial)} held out"


def outline(config: RunConfig, steps: int | None, cost: str, folds: FoldSizes) -> list[str]:
    """Return lines on what a cross-validation would do, for `--dry-run`.

    Args:
        steps: optimizer steps of all runs together; None if they are not known yet.
        cost: the estimated cost in words.
    """
    chosen, budget, names = config.cross_validation, config.tune.budget, configurations(config)
    group = config.data.grouped_by
    by = [
        *(["stratified by label"] if open_encoder(config.data).labeled else []),
        *([f"grouped by {group}"] if group else []),
    ]
    return [
        f"study       {study_name(config)}",
        f"folds       {', '.join([str(chosen.folds), *by])}",
        f"records     {folds}",
        *(f"warning     {text}" for text in folds.warnings),
        f"runs        {budget.trials:,}: {len(names)} configurations, {budget.parallel} at a time",
        f"steps       {UNKNOWN if steps is None else f'{steps:,}'}",
        f"cost        {cost}",
        *(f"compared    {name}" for name in names),
    ]


def ending(study: Study, results: Results) -> list[str]:
    """Return lines on what a cross-validation found."""
    lines = [f"runs    {len(study.history.trials):,}, {spent(study)}"]
    means = [
        (metric, name, number(mean.mean), interval(mean), str(len(results.values[name][metric])))
        for metric in results.metrics
        for name, by_metric in results.means.items()
        if (mean := by_metric.get(metric))
    ]
    lines += ["", *aligned([("metric", "configuration", "mean", "interval", "folds"), *means])]
    if results.comparisons:
        header = (
            "metric",
            "configuration",
            "difference",
            "interval",
            "p (Holm)",
            "folds",
            "verdict",
        )
        rows = [
            (item.metric, item.configuration, *row("", item)[1]) for item in results.comparisons
        ]
        lines += ["", *aligned([header, *rows])]
    return ["", *lines, ""]
