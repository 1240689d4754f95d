"""What a cross-validation found: its scores, as lines of text and as a report."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq
from markupsafe import Markup

from steadytrain.components.evaluate.metric import Scores, load_metric, point_values
from steadytrain.components.evaluate.paired import store_table
from steadytrain.components.pages.charts import aligned
from steadytrain.components.preprocess.folds import preview_folds
from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.errors import BadInput, DataError, StorageError
from steadytrain.components.shared.quantities import number
from steadytrain.components.shared.storage import LocalStorage
from steadytrain.components.tasks.base import open_encoder
from steadytrain.components.tune.ablation import (
    Compared,
    Estimate,
    Row,
    chart,
    compared,
    estimates,
    interval,
    row,
)
from steadytrain.components.tune.designs import AS_IT_IS, FoldDesign, configurations, with_fold
from steadytrain.components.tune.history import Params, Trial
from steadytrain.components.tune.results import UNKNOWN, spent
from steadytrain.components.tune.study import Study, study_name
from steadytrain.components.tune.study_page import study_html, time_tile, write_page
from steadytrain.components.tune.trials.folder import LABELS, TrialFolder


@dataclass(frozen=True)
class FoldSizes:
    """Records of each fold.

    sizes: None if the data were not read.
    why: the reason, if so.
    shortest: see `Preview`.
    """

    sizes: Sequence[int] | None
    warnings: Sequence[str] = ()
    why: str = ""
    shortest: int | None = None

    def __str__(self) -> str:
        if self.sizes is None:
            return f"not checked: {self.why}"
        least, most = min(self.sizes), max(self.sizes)
        return f"{least:,} in each fold" if least == most else f"{least:,} to {most:,} in a fold"


def fold_sizes(config: RunConfig) -> FoldSizes:
    """Divide the data of a cross-validation, if they can be read here.

    Raises:
        ConfigError: a run that holds out a fold is not possible.
        DataError: the data cannot be used, or not be divided.
    """
    held_out = with_fold(config, 0)
    try:
        sizes = preview_folds(held_out)
    except DataError:
        raise
    except (BadInput, StorageError) as error:
        return FoldSizes(None, why=error.message)
    return FoldSizes(sizes.sizes, sizes.warnings, shortest=sizes.shortest)


def checked_start(config: RunConfig) -> list[Params]:
    """Reject data that cannot be divided, before a new cross-validation is written to its log.

    Each run would fail on them, and the log would keep the name for these folds.

    Returns:
        No parameters: the design knows all runs.

    Raises:
        ConfigError, DataError: as for `fold_sizes`.
    """
    fold_sizes(config)
    return []


_CLASSES: Final = ("label", "prediction")
_NAMES: Final = pa.list_(pa.string())
_LABEL_SETS: Final = ("labels", "predictions")


@dataclass(frozen=True)
class Fold:
    """A configuration on the fold that its run held out.

    metrics: every metric that applies, by name.
    table: the scores of the records, in the columns of `Scorer.score`.
    """

    configuration: str
    fold: int
    metrics: Mapping[str, float]
    table: pa.Table


def folds_of(study: Study, folder: Path) -> Iterator[Fold]:
    """Yield the folds whose trials have finished, in the order of the trials.

    Args:
        folder: of the study.
    """
    design = FoldDesign(study.config)
    for trial in study.history.trials:
        path = TrialFolder(folder, trial.number).scores
        if trial.status == "finished" and path.exists():
            if trial.scored and (why := TrialFolder(folder, trial.number).damage(trial.scored)):
                raise BadInput(
                    f"the scores of a fold are damaged: {why}",
                    remedy="run the same command again: the fold is trained again",
                )
            table = pq.read_table(path)
            metrics = point_values(Scores.of(table))
            yield Fold(design.configuration(trial), design.fold(trial), metrics, table)


def predictions(folds: list[Fold]) -> pa.Table:
    """Return the out-of-fold predictions of all configurations, one row per record.

    The columns are `configuration`, `fold` and those of the scores, with the names of the classes
    instead of their numbers. With several divisions, a record has a row for each. Rows are sorted
    by configuration, record and fold.
    """
    return pa.concat_tables(map(_named, folds)).sort_by(
        [("configuration", "ascending"), ("id", "ascending"), ("fold", "ascending")]
    )


def _named(fold: Fold) -> pa.Table:
    table, count = fold.table, fold.table.num_rows
    labels: list[str] = json.loads((table.schema.metadata or {}).get(LABELS, b"[]"))
    columns: dict[str, Any] = {
        "configuration": pa.array([fold.configuration] * count, pa.string()),
        "fold": pa.array([fold.fold] * count, pa.int64()),
    }
    for name in table.column_names:
        columns[name] = column = table.column(name)
        if labels and name in _CLASSES:
            columns[name] = pa.array(labels).take(column)
        elif labels and name in _LABEL_SETS:
            sets: list[Any] = column.to_pylist()
            columns[name] = pa.array([[labels[one] for one in row] for row in sets], _NAMES)
    return pa.table(columns)


SUMMARY: Final = "cross-validation.json"
PREDICTIONS: Final = "out-of-fold.parquet"


@dataclass(frozen=True)
class Comparison(Compared):
    """A configuration compared with the configuration as it is, in one metric."""

    configuration: str
    metric: str


@dataclass(frozen=True)
class Results:
    """What a cross-validation found.

    values: by configuration and metric, the value on each fold.
    means: by configuration and metric, the mean over the folds.
    """

    folds: Sequence[Fold]
    values: Mapping[str, Mapping[str, Mapping[int, float]]]
    means: Mapping[str, Mapping[str, Estimate]]
    comparisons: Sequence[Comparison]

    @property
    def metrics(self) -> list[str]:
        """The metrics that apply, sorted."""
        return sorted({metric for result in self.values.values() for metric in result})


def results_of(study: Study, folder: Path) -> Results:
    """Return what the finished trials of a cross-validation show.

    Args:
        folder: of the study.
    """
    chosen, folds = study.config.cross_validation, list(folds_of(study, folder))
    values: dict[str, dict[str, dict[int, float]]] = {
        name: {} for name in configurations(study.config)
    }
    for fold in folds:
        for metric, value in fold.metrics.items():
            values[fold.configuration].setdefault(metric, {})[fold.fold] = value
    # A fold is tested on, and the other folds are trained on.
    overlap = 1 / (chosen.folds - 1)
    means = {
        name: {
            metric: estimate
            for metric, by_fold in by_metric.items()
            for estimate in estimates([list(by_fold.values())], chosen.confidence, overlap=overlap)
            if estimate
        }
        for name, by_metric in values.items()
    }
    compared = [
        item
        for metric in sorted(values[AS_IT_IS])
        for item in _comparisons(metric, values, chosen.confidence, overlap)
    ]
    return Results(folds, values, means, compared)


def summary(study: Study, results: Results) -> dict[str, Any]:
    """Return what a cross-validation found, for programs."""
    chosen, history = study.config.cross_validation, study.history
    return {
        "study": study_name(study.config),
        "folds": chosen.folds,
        **({} if chosen.repeats == 1 else {"repeats": chosen.repeats}),
        "confidence": chosen.confidence,
        "configurations": [
            {
                "name": name,
                "sets": dict(sets),
                "means": {metric: _mean(result) for metric, result in results.means[name].items()},
                "values": results.values[name],
            }
            for name, sets in configurations(study.config).items()
        ],
        "comparisons": [
            item.as_plain(configuration=item.configuration, metric=item.metric)
            for item in results.comparisons
        ],
        "trials": len(history.trials),
        "trials_failed": history.failed,
        "seconds": round(history.seconds, 3),
        "usd": study.usd(study.hours),
    }


def write_results(study: Study, results: Results, folder: Path) -> None:
    """Write `cross-validation.json` and, if a fold is finished, `out-of-fold.parquet`."""
    text = json.dumps(summary(study, results), indent=2)
    LocalStorage(folder).write(SUMMARY, f"{text}\n".encode())
    if results.folds:
        store_table(folder / PREDICTIONS, predictions(list(results.folds)))


def _comparisons(
    metric: str,
    values: Mapping[str, Mapping[str, Mapping[int, float]]],
    confidence: float,
    overlap: float,
) -> list[Comparison]:
    base, greater = values[AS_IT_IS][metric], load_metric(metric).greater_is_better
    others = {name: result for name, result in values.items() if name != AS_IT_IS}
    scores = [(result.get(metric, {}), base) for result in others.values()]
    found = compared(scores, confidence, greater_is_better=greater, overlap=overlap)
    return [Comparison(*result, name, metric) for result, name in zip(found, others, strict=True)]


def _mean(found: Estimate) -> dict[str, float | None]:
    return {"mean": found.mean, "low": found.low, "high": found.high}


def words(config: RunConfig) -> Callable[[Trial], str]:
    """Return what describes a trial: its configuration and its fold."""
    design = FoldDesign(config)
    named = config.cross_validation.named
    return lambda trial: f"{design.configuration(trial)}, {named(design.fold(trial))} held out"


def outline(config: RunConfig, steps: int | None, cost: str, folds: FoldSizes) -> list[str]:
    """Return lines on what a cross-validation would do, for `--dry-run`.

    Args:
        steps: optimizer steps of all runs together; None if they are not known yet.
        cost: the estimated cost in words.
    """
    chosen, budget, names = config.cross_validation, config.tune.budget, configurations(config)
    group = config.data.grouped_by
    stratified = open_encoder(config.data).labeled and not config.data.in_time
    by = [
        *(["in time"] if config.data.in_time else []),
        *(["stratified by label"] if stratified else []),
        *([f"grouped by {group}"] if group else []),
    ]
    return [
        f"study       {study_name(config)}",
        f"folds       {', '.join([str(chosen.folds), *by])}",
        *([] if chosen.repeats == 1 else [f"repeats     {chosen.repeats}: different divisions"]),
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
            ("Folds", f"{chosen.splits}", f"{chosen.repeats} divisions" * (chosen.repeats > 1)),
            ("Runs", runs, f"{history.failed:,} failed"),
            time_tile(study),
        ],
        confidence=f"{chosen.confidence:.4g}",
        folds=[chosen.named(fold) for fold in range(chosen.splits)],
        metrics=list(_metrics(results, chosen.splits)),
        comparisons=list(_comparison_rows(results)),
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


def _comparison_rows(results: Results) -> Iterator[tuple[str, Markup, list[Row]]]:
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
