"""A cross-validation's report: one HTML page that loads nothing from anywhere."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from markupsafe import Markup

from steadytrain.components.pages.charts import intervals
from steadytrain.components.shared.quantities import duration, money, number
from steadytrain.components.shared.storage import LocalStorage
from steadytrain.components.tune.cross_validation.results import Comparison, Results
from steadytrain.components.tune.cross_validation.table import compared, interval
from steadytrain.components.tune.html import html
from steadytrain.components.tune.page import PAGE
from steadytrain.components.tune.study import Study, study_name

_KINDS: Final = {True: "best", False: "failed", None: "stopped"}


def write_page(study: Study, results: Results, folder: Path) -> None:
    """Write the report of a cross-validation to its folder."""
    LocalStorage(folder).write(PAGE, render(study, results).encode())


def render(study: Study, results: Results) -> str:
    """Return the report as HTML."""
    chosen, history = study.config.cross_validation, study.history
    usd = study.usd(study.hours)
    return html(
        "cross-validation.html.j2",
        kind="cross-validation",
        name=study_name(study.config),
        sentence=_sentence(results),
        tiles=[
            ("Folds", f"{chosen.folds}", ""),
            (
                "Runs",
                f"{len(history.trials):,} of {study.tune.budget.trials:,}",
                f"{history.failed:,} failed",
            ),
            ("Training time", duration(history.seconds), "" if usd is None else money(usd)),
        ],
        confidence=f"{chosen.confidence:.4g}",
        folds=range(chosen.folds),
        metrics=list(_metrics(study, results)),
        comparisons=list(_comparisons(results)),
        failures=Counter(item.failure for item in history.trials if item.failure),
        config_text=study.config.to_yaml(),
    )


def _metrics(study: Study, results: Results) -> Iterator[tuple[str, list[Any]]]:
    """Yield each metric with a row of text for each configuration."""
    for metric in results.metrics:
        rows = []
        for name, by_metric in results.values.items():
            if metric in by_metric:
                mean, values = results.means[name][metric], by_metric[metric]
                each = [
                    number(values.get(fold)) for fold in range(study.config.cross_validation.folds)
                ]
                rows.append((name, number(mean.mean), interval(mean), each))
        yield metric, rows


def _comparisons(results: Results) -> Iterator[tuple[str, Markup, list[Any]]]:
    by_metric = dict[str, list[Comparison]]()
    for item in results.comparisons:
        by_metric.setdefault(item.metric, []).append(item)
    for metric, items in by_metric.items():
        rows = [
            (item.configuration, found.low, found.mean, found.high, _KINDS[item.better])
            for item in items
            if (found := item.estimate) and found.low is not None and found.high is not None
        ]
        yield (
            metric,
            intervals(f"Differences in {metric}", rows),
            [compared(item) for item in items],
        )


def _sentence(results: Results) -> str:
    if not results.folds:
        return "No fold has finished."
    counts = Counter(item.better for item in results.comparisons)
    records = sum(fold.table.num_rows for fold in results.folds)
    text = f"{records:,} out-of-fold predictions on {len(results.folds)} held-out folds."
    if not results.comparisons:
        return text
    return (
        f"{text} Of {len(results.comparisons)} comparisons, {counts[True]} are better, "
        f"{counts[False]} worse, and {counts[None]} are not decided."
    )
