"""The board of a search: every configuration, the ensemble, and what its scores are worth."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
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
from steadytrain.components.automl.design import SearchDesign
from steadytrain.components.automl.ensemble import ROUNDS, Limit, OutOfFold, chosen
from steadytrain.components.automl.explanation import Explanation, explanation_of
from steadytrain.components.automl.portfolio import DEFAULT, Configuration, families, portfolio
from steadytrain.components.automl.unit_scores import (
    best_step,
    forecasts_of,
    joined_folds,
    losses_of,
    out_of_fold,
    unit_scores,
    why_incomplete,
)
from steadytrain.components.evaluate.bootstrap import FloatArray, studentized
from steadytrain.components.evaluate.metric import point_values
from steadytrain.components.evaluate.scores import Scores
from steadytrain.components.series.ensemble import LEARNERS
from steadytrain.components.shared.artifact import Artifact
from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.config.task_names import LABEL_SETS, SERIES
from steadytrain.components.shared.config.tune import AutoMLConstraints
from steadytrain.components.shared.quantities import number, size
from steadytrain.components.shared.records import Interval
from steadytrain.components.tabular.explained import Explained
from steadytrain.components.tune.history import History, Trial
from steadytrain.components.tune.study import Study
from steadytrain.components.tune.trials.folder import ARTIFACT, EXPLAINED, LABELS

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
    """

    configuration: Configuration
    score: float
    spread: float
    metrics: Mapping[str, float]
    seconds: float
    artifacts: Sequence[Artifact]
    steps: Sequence[int]
    missed: str

    @property
    def latency_ms(self) -> float:
        """The median time for a record."""
        return statistics.fmean(item.latency_p50_ms for item in self.artifacts)

    @property
    def slowest_ms(self) -> float:
        """The time for the slowest record of 100."""
        return statistics.fmean(item.latency_p99_ms for item in self.artifacts)

    @property
    def size_mb(self) -> float:
        return statistics.fmean(item.size_mb for item in self.artifacts)


@dataclass(frozen=True)
class Board:
    """What a search found.

    rows: the best configuration first.
    weights: by the place of a row, how often the ensemble has it.
    score: the ensemble's mean loss on the records that chose it: too good to be true.
    corrected: the mean loss of ensembles that were chosen and calibrated without the record's fold.
    uncalibrated: the same without calibration.
    calibration: of the winner.
    decided: the metric that decisions are made for, without and with them, corrected too; empty if
        the likeliest class is predicted.
    better: default LightGBM's loss minus the corrected one; None without that configuration.
    skipped: why a configuration has no row, by name.
    labels: the classes; empty for numbers.
    explanation: what the winner relies on; None without a winner.
    numbers: what the winner predicts for each record of the first division, and the truth; empty
        for classes.
    forecasts: the winner's out-of-fold scores of time series.
    sets: whether a record has any number of the labels.
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


def mean_loss(folder: Path, trials: Sequence[Trial]) -> float | None:
    """Return the mean loss of a configuration over all folds; None if one has no scores.

    Args:
        trials: of all folds.

    Raises:
        BadInput: as for `board_of`.
    """
    total, records = 0.0, 0
    for trial in trials:
        if trial.status != "finished":
            return None
        losses = losses_of(unit_scores(folder, trial))
        total, records = total + float(losses.sum()), records + len(losses)
    return total / records


def board_of(study: Study, folder: Path) -> Board | None:
    """Return what a search found; None if no configuration is trained on all folds.

    Args:
        folder: of the study.

    Raises:
        BadInput: what a unit left is damaged.
    """
    limits = study.config.automl.constraints
    _, skipped = portfolio(limits, study.config.data)
    rows, tables, explained = list[Row](), list[pa.Table](), list[list[Explained]]()
    for _, row, parts in _trained(study.config, study.history, folder, skipped):
        rows.append(row)
        tables.append(joined_folds(parts))
        explained.append(
            [
                Explained.model_validate_json(part.schema.metadata[EXPLAINED])
                for part in parts
                if EXPLAINED in part.schema.metadata
            ]
        )
        labels: list[str] = json.loads(parts[0].schema.metadata[LABELS])
    if not rows:
        return None
    order = sorted(range(len(rows)), key=lambda place: (rows[place].score, place))
    rows, tables = [rows[place] for place in order], [tables[place] for place in order]
    found, costs = (
        out_of_fold(tables, alone_in(study.config, [row.configuration for row in rows])),
        list(_limits(rows, limits)),
    )
    rounds = _rounds(study.config)
    weights = chosen(found, costs, rounds=rounds)
    if not weights:
        return Board(rows, {}, float("nan"), float("nan"), None, skipped)
    decision = study.config.automl.decision
    promise, calibration = (
        promised(found, costs, decision, rounds=rounds),
        fitted(found, weights, decision),
    )
    default = [place for place, row in enumerate(rows) if row.configuration.name == DEFAULT]
    mixed, honest = found.mixed(weights), promise.losses
    own = mixed
    if found.chances:
        chances = calibration.chances(mixed_chances(found, weights))
        own = chances[np.arange(len(chances)), found.classes]
    return Board(
        rows,
        dict(sorted(weights.items())),
        float(found.losses(own).mean()),
        float(honest.mean()),
        _difference(found.losses(found.predicted[default[0]]) - honest, found) if default else None,
        skipped,
        labels,
        float(promise.uncalibrated.mean()),
        calibration,
        _decided(tables[0], promise, decision),
        None
        if found.scale is not None
        else explanation_of(
            {place: explained[order[place]] for place in weights},
            weights,
            found,
            rows_of(tables[0]),
            calibration,
        ),
        _first_numbers(mixed, found, study.config.cross_validation.folds),
        None if found.scale is None else forecasts_of(tables, weights, found),
        sets=study.config.data.task in LABEL_SETS,
    )


def _rounds(config: RunConfig) -> int:
    """Return how many members an ensemble has at most."""
    return 1 if config.automl.constraints.interpretable else ROUNDS


def alone_in(config: RunConfig, found: Iterable[Configuration]) -> list[int]:
    """Return the places of configurations that no ensemble can train as members."""
    if config.data.task not in SERIES:
        return []
    known = families()
    return [n for n, item in enumerate(found) if known[item.family].framework not in LEARNERS]


def _decided(table: pa.Table, promise: Promise, decision: Decision) -> tuple[float, ...]:
    """Return a metric of the likeliest classes, and of the decisions that are made for it."""
    if decision == "likeliest" or promise.decided is None or promise.likeliest is None:
        return ()
    place = table.column_names.index("prediction")
    return tuple(
        point_values(Scores.of(table.set_column(place, "prediction", pa.array(classes))))[decision]
        for classes in (promise.likeliest, promise.decided)
    )


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
    found = out_of_fold(tables, alone_in(config, [row.configuration for _, row, _ in trained]))
    rounds = _rounds(config)
    costs = list(_limits([row for _, row, _ in trained], limits))
    return [trained[place][0] for place in chosen(found, costs, rounds=rounds)]


def _trained(
    config: RunConfig, history: History, folder: Path, skipped: dict[str, str]
) -> Iterator[tuple[int, Row, Sequence[pa.Table]]]:
    """Yield what is trained on all folds: the place, the row, and the scores of each fold.

    Args:
        skipped: receives why the others are not.
    """
    design = SearchDesign(config, history, lambda _: None)
    for place, item in enumerate(design.configurations):
        trials = history.trials[place * design.folds : (place + 1) * design.folds]
        if reason := why_incomplete(trials, design.folds):
            skipped[item.name] = reason
            continue
        parts = [unit_scores(folder, trial) for trial in trials]
        yield place, _row(item, trials, parts, config), parts


def _row(
    item: Configuration,
    trials: Sequence[Trial],
    parts: Sequence[pa.Table],
    config: RunConfig,
) -> Row:
    losses, limits = [losses_of(part) for part in parts], config.automl.constraints
    folds = config.cross_validation.folds
    divisions = [
        point_values(Scores.of(joined_folds(parts[first : first + folds])))
        for first in range(0, len(parts), folds)
    ]
    made = Row(
        item,
        score=float(np.concatenate(losses).mean()),
        spread=statistics.stdev(float(values.mean()) for values in losses),
        metrics={
            name: statistics.fmean(found[name] for found in divisions)
            for name in divisions[0]
            if all(name in found for found in divisions)
        },
        seconds=sum(trial.seconds for trial in trials),
        artifacts=[Artifact.model_validate_json(part.schema.metadata[ARTIFACT]) for part in parts],
        steps=[best_step(trial, item) for trial in trials],
        missed="",
    )
    missed = []
    if limits.latency_ms is not None and made.latency_ms > limits.latency_ms:
        missed.append(f"{number(made.latency_ms)} ms for a record, above {limits.latency_ms:g} ms")
    if limits.model_mb is not None and made.size_mb > limits.model_mb:
        missed.append(f"{size(made.size_mb * 1e6)}, above {size(limits.model_mb * 1e6)}")
    return replace(made, missed="; ".join(missed))


def _limits(rows: Sequence[Row], limits: AutoMLConstraints) -> Iterator[Limit]:
    yield Limit(0.5, np.array([0.0 if not row.missed else 1.0 for row in rows]))
    if limits.latency_ms is not None:
        yield Limit(limits.latency_ms, np.array([row.latency_ms for row in rows]))
    if limits.model_mb is not None:
        yield Limit(limits.model_mb, np.array([row.size_mb for row in rows]))


def _difference(values: FloatArray, found: OutOfFold) -> Interval:
    def means(weights: FloatArray) -> dict[str, FloatArray]:
        return {"": weights @ values / weights.sum(axis=1)}

    return studentized(means, found.units, _CONFIDENCE)[""]


def shares(board: Board) -> dict[str, float]:
    """Return the share of each member in the winner's prediction, by name."""
    total = sum(board.weights.values())
    return {
        board.rows[place].configuration.name: weight / total
        for place, weight in board.weights.items()
    }
