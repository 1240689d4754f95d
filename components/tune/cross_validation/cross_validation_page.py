"""A cross-validation's report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from markupsafe import Markup

from steadytrain.components.shared.quantities import number
from steadytrain.components.tune.compared import Row, chart, interval, row
from steadytrain.components.tune.cross_validation.results import (
    Comparison,
    Results,
    results_of,
    write_results,
)
from steadytrain.components.tune.study import Study
from steadytrain.components.tune.study_page import study_html, time_tile, write_page


def write_cross_validation(study: Study, folder: Path) -> None:
    """Write the results of a cross-validation, the predictions and the page."""
    results = results_of(study, folder)
    write_results(study, results, folder)
    write_page(render(study, results), folder)


def render(study: Study, results: Results) -> str:
    """Return the report as HTML."""
    chosen, history = study.config.cross_validation, study.history
    runs = f"{len(history.trials):,} of {study.tune.budget.trials:,}"
    return study_html(
        "cross_validation",
        study,
        sentence=_sentence(results),
        tiles=[
            ("Folds", f"{chosen.folds}", ""),
            ("Runs", runs, f"{history.failed:,} failed"),
            time_tile(study),
        ],
        confidence=f"{chosen.confidence:.4g}",
        folds=[f"fold {fold}" for fold in range(chosen.folds)],
        metrics=list(_metrics(results, chosen.folds)),
        comparisons=list(_comparisons(results)),
    )


def _metrics(results: Results, folds: int) -> Iterator[tuple[str, list[Row]]]:
    """Yield each metric with a row of text for each configuration."""
    for metric in results.metrics:
        rows = []
        for name, by_metric in results.values.items():
            if metric in by_metric:
                mean, values = results.means[name][metric], by_metric[metric]
                each = [number(values.get(fold)) for fold in range(folds)]
                rows.append((name, [number(mean.mean), interval(mean), *each]))
        yield metric, rows


def _comparisons(results: Results) -> Iterator[tuple[str, Markup, list[Row]]]:
    by_metric = dict[str, list[tuple[str, Comparison]]]()
    for item in results.comparisons:
        by_metric.setdefault(item.metric, []).append((item.configuration, item))
    for metric, items in by_metric.items():
        yield metric, chart(f"Differences in {metric}", items), [row(*item) for item in items]


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
