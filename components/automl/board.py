"""The board of a search: every configuration, the ensemble, and what its scores are worth."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa

from steadytrain.components.automl.calibration import (
    Calibration,
    Decision,
    Promise,
    fitted,
    mixed_chances,
    promised,
)
from steadytrain.components.automl.design import SearchDesign, planned
from steadytrain.components.automl.ensemble import (
    ALL,
    BAGGED,
    SINGLE,
    Limit,
    OutOfFold,
    Selection,
    chosen,
)
from steadytrain.components.automl.explanation import Explanation, explanation_of
from steadytrain.components.automl.portfolio import DEFAULT, Configuration, families, portfolio
from steadytrain.components.automl.unit_scores import (
    SETS,
    artifacts_of,
    best_step,
    explained_of,
    forecasts_of,
    joined_folds,
    losses_of,
    missed_limits,
    out_of_fold,
    unit_scores,
    why_incomplete,
)
from steadytrain.components.evaluate.bootstrap import (
    FloatArray,
    count_units,
    fewest_units,
    studentized,
)
from steadytrain.components.evaluate.metric import Scores, point_values
from steadytrain.components.series.ensemble import LEARNERS
from steadytrain.components.shared.artifact import Artifact
from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.config.data_sections import LABEL_SETS, NETWORKS, SERIES
from steadytrain.components.shared.config.tune import AutoMLConstraints
from steadytrain.components.shared.records import Interval
from steadytrain.components.tabular.explained import Explained
from steadytrain.components.tune.history import History, Trial
from steadytrain.components.tune.study import Study
from steadytrain.components.tune.trials.folder import EXPLAINED, LABELS, PEAK

LIGHTGBM: Final = "default LightGBM"
FREQUENCIES: Final = "the frequencies of the classes"
"""The baseline of networks, with which default LightGBM is not compared."""
_CONFIDENCE: Final = 0.95


@dataclass(frozen=True)
class Row:
    """A configuration that was trained on all folds.

    score: mean loss over all records, each predicted by the model that did not learn from it.
    spread: standard deviation of the folds' losses.
    metrics: over all records; with several divisions into folds, the mean of theirs.
    seconds: of training, on all folds.
    artifacts: of the exported models, by fold.
    steps: at which the exported models were the best, by fold.
    missed: which constraint it misses; "" if none.
    peak_mb: the most resident memory of the processes that trained it.
    usd: what training cost; None if the price is unknown.
    """

    configuration: Configuration
    score: float
    spread: float
    metrics: Mapping[str, float]
    seconds: float
    artifacts: Sequence[Artifact]
    steps: Sequence[int]
    missed: str
    peak_mb: float = 0.0
    usd: float | None = None

    @property
    def latency_ms(self) -> float:
        """The median time for a record."""
        return statistics.fmean(item.latency_p50_ms for item in self.artifacts)

    @property
    def slowest_ms(self) -> float:
        """The 99th percentile of the time for a record."""
        return statistics.fmean(item.latency_p99_ms for item in self.artifacts)

    @property
    def size_mb(self) -> float:
        return statistics.fmean(item.size_mb for item in self.artifacts)

    @property
    def memory_mb(self) -> float | None:
        """What the exported models take; None if one of them does not say it."""
        known = [it.memory_mb for it in self.artifacts if it.memory_mb is not None]
        return statistics.fmean(known) if len(known) == len(self.artifacts) else None


@dataclass(frozen=True)
class Board:
    """What a search found.

    rows: the best configuration first.
    weights: by the index of a row, how often the ensemble has it.
    score: the ensemble's mean loss on the records that chose it: too good to be true.
    corrected: the mean loss of ensembles that were chosen and calibrated without the record's fold.
    uncalibrated: the same without calibration.
    calibration: of the winner.
    decided: the metric that decisions are made for, without and with them, corrected too; empty if
        the likeliest class is predicted, or each label from a half on.
    better: the loss of `baseline` minus the corrected one; None without that. The
        ends are NaN if too few records, groups or series are independent to tell.
    skipped: why a configuration has no row, by name.
    labels: the classes; empty for numbers.
    explanation: what the winner relies on; None without a winner.
    numbers: what the winner predicts for each record of the first division, and the truth; empty
        for classes.
    forecasts: the winner's out-of-fold scores of time series.
    sets: whether a record has any number of the labels.
    baseline: what the winner is compared with by `better`.
    """

    rows: Sequence[Row]
    weights: Mapping[int, int]
    score: float
    corrected: float
    better: Interval | None
    skipped: Mapping[str, str]
    labels: Sequence[str] = ()
    uncalibrated: float = math.nan
    calibration: Calibration = field(default_factory=Calibration)
    decided: tuple[float, ...] = ()
    explanation: Explanation | None = None
    numbers: Sequence[tuple[float, float]] = ()
    forecasts: pa.Table | None = None
    sets: bool = False
    baseline: str = LIGHTGBM


def mean_loss(config: RunConfig, folder: Path, trials: Sequence[Trial]) -> float | None:
    """Return the mean loss of a configuration over all folds; None if one has no scores.

    It is infinite if the configuration misses a limit: nothing is to be searched around it.

    Args:
        trials: of all folds.

    Raises:
        BadInput: as for `board_of`.
    """
    if any(trial.status != "finished" for trial in trials):
        return None
    parts = [unit_scores(folder, trial) for trial in trials]
    if missed_limits(artifacts_of(parts), config.automl.constraints):
        return math.inf
    return float(np.concatenate([losses_of(part) for part in parts]).mean())


def board_of(study: Study, folder: Path) -> Board | None:
    """Return what a search found; None if no configuration is trained on all folds.

    Args:
        folder: of the study.

    Raises:
        BadInput: what a unit left is damaged.
    """
    return _board_after(study, folder, study.history.records)


@lru_cache(maxsize=1)
def _board_after(study: Study, folder: Path, records: int) -> Board | None:
    """Return the board after so many records of the log. It is written and read in turn."""
    del records
    limits = study.config.automl.constraints
    _, skipped = portfolio(study.config)
    skipped |= planned(study.history.queued)[1]
    rows, tables, explained = list[Row](), list[pa.Table](), list[list[Explained]]()
    for _, row, parts in _trained(study.config, study.history, folder, skipped):
        rows.append(row)
        tables.append(joined_folds(parts))
        explained.append(
            [
                item
                for part in parts
                if EXPLAINED in part.schema.metadata and (item := explained_of(part))
            ]
        )
        labels: list[str] = json.loads(parts[0].schema.metadata[LABELS])
    if not rows:
        return None
    order = sorted(range(len(rows)), key=lambda index: (rows[index].score, index))
    rows, tables = [rows[index] for index in order], [tables[index] for index in order]
    results, costs = (
        out_of_fold(
            tables,
            alone_in(study.config, [row.configuration for row in rows]),
            final=study.config.data.task in NETWORKS,
        ),
        list(_limits(rows, limits)),
    )
    selection = selection_of(study.config)
    weights = chosen(results, costs, selection)
    if not weights:
        return Board(rows, {}, float("nan"), float("nan"), None, skipped)
    decision = study.config.automl.decision
    promise, calibration = (
        promised(results, costs, decision, selection),
        fitted(results, weights, decision),
    )
    names = [row.configuration.name for row in rows]
    networks, baseline = study.config.data.task in NETWORKS, None
    if networks:
        baseline = results.frequencies()
    elif DEFAULT in names:
        baseline = results.predicted[names.index(DEFAULT)]
    mixed, honest = results.mixed(weights), promise.losses
    predicted = mixed
    if results.chances:
        chances = calibration.chances(mixed_chances(results, weights))
        predicted = chances[np.arange(len(chances)), results.classes]
    return Board(
        rows,
        dict(sorted(weights.items())),
        float(results.losses(predicted).mean()),
        float(honest.mean()),
        None if baseline is None else _difference(results.losses(baseline) - honest, results),
        skipped,
        labels,
        float(promise.uncalibrated.mean()),
        calibration,
        _decided(tables[0], promise, decision),
        explanation_of(
            {index: explained[order[index]] for index in weights},
            weights,
            results,
            rows_of(tables[0]),
            calibration,
        )
        if any(explained)
        else None,
        _first_numbers(mixed, results, study.config.cross_validation.folds),
        None if results.scale is None else forecasts_of(tables, weights, results),
        sets=study.config.data.task in LABEL_SETS,
        baseline=FREQUENCIES if networks else LIGHTGBM,
    )


def selection_of(config: RunConfig) -> Selection:
    """Return how the ensemble is chosen: with the best quality, it may have many members."""
    if config.automl.constraints.interpretable:
        return SINGLE
    return BAGGED if config.automl.quality == "best" else ALL


def alone_in(config: RunConfig, found: Iterable[Configuration]) -> list[int]:
    """Return the places of configurations that no ensemble can train as members."""
    if config.data.task in NETWORKS:
        return [n for n, _ in enumerate(found)]
    if config.data.task not in SERIES:
        return []
    known = families()
    return [n for n, item in enumerate(found) if known[item.family].framework not in LEARNERS]


def _decided(table: pa.Table, promise: Promise, decision: Decision) -> tuple[float, ...]:
    """Return a metric of the likeliest classes, and of the decisions that are made for it.

    Args:
        table: the joined scores of a configuration, which have the truth.
    """
    if decision == "likeliest" or promise.decided is None or promise.likeliest is None:
        return ()
    name = "predictions" if SETS in table.column_names else "prediction"
    index, rows = table.column_names.index(name), table.num_rows
    result = list[float]()
    for classes in (promise.likeliest, promise.decided):
        own: Any = classes
        if name == "predictions":
            own = [np.flatnonzero(row) for row in classes.reshape(rows, -1)]
        scored = table.set_column(index, name, pa.array(own))
        result.append(point_values(Scores.of(scored))[decision])
    return tuple(result)


def _first_numbers(
    mixed: FloatArray, found: OutOfFold, folds: int
) -> Sequence[tuple[float, float]]:
    if found.truth is None:
        return []
    first = found.fold < folds
    return list(zip(mixed[first].tolist(), found.truth[first].tolist(), strict=True))


def rows_of(table: pa.Table) -> list[tuple[str, int]]:
    """Return the record and the fold of each row of joined scores."""
    ids: list[Any] = table["id"].to_pylist()
    return list(zip(ids, table["fold"].to_numpy().tolist(), strict=True))


def members_of(config: RunConfig, history: History, folder: Path) -> list[int]:
    """Return the places of the configurations that would be trained again now."""
    trained = list(_trained(config, history, folder, {}))
    if not trained:
        return []
    limits = config.automl.constraints
    tables = [joined_folds(parts) for _, _, parts in trained]
    predictions = out_of_fold(
        tables, alone_in(config, [row.configuration for _, row, _ in trained])
    )
    costs = list(_limits([row for _, row, _ in trained], limits))
    return [trained[index][0] for index in chosen(predictions, costs, selection_of(config))]


def _trained(
    config: RunConfig, history: History, folder: Path, skipped: dict[str, str]
) -> Iterator[tuple[int, Row, Sequence[pa.Table]]]:
    """Yield what is trained on all folds: the index, the row, and the scores of each fold.

    Args:
        skipped: receives why the others are not.
    """
    design = SearchDesign(config, history, lambda _: None)
    for index, item in enumerate(design.configurations):
        trials = history.trials[index * design.folds : (index + 1) * design.folds]
        if reason := why_incomplete(trials, design.folds):
            skipped[item.name] = reason
            continue
        parts = [unit_scores(folder, trial) for trial in trials]
        yield index, _row(item, trials, parts, config), parts


def _row(
    item: Configuration,
    trials: Sequence[Trial],
    parts: Sequence[pa.Table],
    config: RunConfig,
) -> Row:
    losses, artifacts = [losses_of(part) for part in parts], artifacts_of(parts)
    folds, price = config.cross_validation.folds, config.compute.price_per_hour
    divisions = [
        point_values(Scores.of(joined_folds(parts[first : first + folds])))
        for first in range(0, len(parts), folds)
    ]
    return Row(
        item,
        score=float(np.concatenate(losses).mean()),
        spread=statistics.stdev(float(values.mean()) for values in losses),
        metrics={
            name: statistics.fmean(division[name] for division in divisions)
            for name in divisions[0]
            if all(name in division for division in divisions)
        },
        seconds=sum(trial.seconds for trial in trials),
        artifacts=artifacts,
        steps=[best_step(trial, item) for trial in trials],
        missed=missed_limits(artifacts, config.automl.constraints),
        peak_mb=max(int(part.schema.metadata[PEAK]) for part in parts) / 1e6,
        usd=None if price is None else sum(trial.seconds for trial in trials) / 3600 * price,
    )


def _limits(rows: Sequence[Row], limits: AutoMLConstraints) -> Iterator[Limit]:
    yield Limit(0.5, np.array([0.0 if not row.missed else 1.0 for row in rows]))
    if limits.latency_ms is not None:
        yield Limit(limits.latency_ms, np.array([row.latency_ms for row in rows]))
    if limits.model_mb is not None:
        yield Limit(limits.model_mb, np.array([row.size_mb for row in rows]))


def _difference(values: FloatArray, found: OutOfFold) -> Interval:
    def means(weights: FloatArray) -> dict[str, FloatArray]:
        return {"": weights @ values / weights.sum(axis=1)}

    result = studentized(means, found.units, _CONFIDENCE)[""]
    if count_units(found.units) >= fewest_units(_CONFIDENCE):
        return result
    return Interval(value=result.value, low=math.nan, high=math.nan)


def shares(board: Board) -> dict[str, float]:
    """Return the share of each member in the winner's prediction, by name."""
    total = sum(board.weights.values())
    return {
        board.rows[index].configuration.name: weight / total
        for index, weight in board.weights.items()
    }
