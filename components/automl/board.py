"""The board of a search: every configuration, the ensemble, and what its scores are worth."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

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
from steadytrain.components.evaluate.bootstrap import FloatArray, studentized, units_of
from steadytrain.components.evaluate.metric import point_values
from steadytrain.components.evaluate.scores import Scores
from steadytrain.components.pages.charts import aligned
from steadytrain.components.shared.artifact import Artifact
from steadytrain.components.shared.config import RunConfig, from_mapping
from steadytrain.components.shared.config.series import SERIES
from steadytrain.components.shared.config.space import changed
from steadytrain.components.shared.config.tune import AutoMLConstraints
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.shared.quantities import duration, number, size
from steadytrain.components.shared.records import Interval
from steadytrain.components.shared.storage import LocalStorage
from steadytrain.components.tabular.explained import Explained
from steadytrain.components.tune.history import History, Trial
from steadytrain.components.tune.results import BEST
from steadytrain.components.tune.study import Study, study_name
from steadytrain.components.tune.trials.folder import ARTIFACT, EXPLAINED, LABELS, TrialFolder

BOARD: Final = "board.json"
SCALED: Final = "scaled_error"
"""A column that only the scores of forecasts have. Their loss is the mean of it (MASE)."""
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
        losses = _losses(_scores(folder, trial))
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
        tables.append(_joined(parts))
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
    found, costs = _out_of_fold(tables), list(_limits(rows, limits))
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
        ),
        _first_numbers(mixed, found, study.config.cross_validation.folds),
        None if found.scale is None else tables[next(iter(weights))],
    )


def _rounds(config: RunConfig) -> int:
    """Return how many members an ensemble has at most. A single model forecasts."""
    return 1 if config.automl.constraints.interpretable or config.data.task in SERIES else ROUNDS


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
    found = _out_of_fold([_joined(parts) for _, _, parts in trained])
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
        if reason := _incomplete(trials, design.folds):
            skipped[item.name] = reason
            continue
        parts = [_scores(folder, trial) for trial in trials]
        yield place, _row(item, trials, parts, config), parts


def _scores(folder: Path, trial: Trial) -> pa.Table:
    """Return what a unit left.

    Raises:
        BadInput: it is missing or damaged, or an earlier version of steadytrain wrote it.
    """
    place = TrialFolder(folder, trial.number)
    path = place.scores
    if trial.scored and (why := place.damage(trial.scored)):
        raise BadInput(
            f"the scores of a unit are damaged: {why}",
            remedy="run the same command again: the unit is trained again",
        )
    try:
        found = pq.read_table(path)
        kept = found.schema.metadata or {}
        json.loads(kept[LABELS])
        Artifact.model_validate_json(kept[ARTIFACT])
        if SCALED not in found.column_names:
            Explained.model_validate_json(kept[EXPLAINED])
    except KeyError as error:
        raise _unusable(path, f"lack {error.args[0].decode()!r}") from error
    except (OSError, pa.ArrowException, ValueError) as error:
        raise _unusable(path, f"cannot be read ({str(error).partition(chr(10))[0]})") from error
    return found


def _unusable(path: Path, why: str) -> BadInput:
    return BadInput(
        f"the scores of a unit {why}: {path}. They are damaged, or another version of steadytrain "
        "wrote them",
        remedy="restore the file from a backup, or search again under another name (--run)",
    )


def _incomplete(trials: Sequence[Trial], folds: int) -> str:
    """Return why a configuration has no row."""
    for trial in trials:
        if trial.status == "failed":
            return f"failed ({trial.failure}): {trial.error.partition(chr(10))[0][:300]}"
    for trial in trials:
        if trial.status == "skipped":
            return trial.reason
    done = sum(trial.status == "finished" for trial in trials)
    return "" if done == folds else f"the budget ended it after {done} of {folds} folds"


def _row(
    item: Configuration,
    trials: Sequence[Trial],
    parts: Sequence[pa.Table],
    config: RunConfig,
) -> Row:
    losses, limits = [_losses(part) for part in parts], config.automl.constraints
    folds = config.cross_validation.folds
    divisions = [
        point_values(Scores.of(_joined(parts[first : first + folds])))
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
        steps=[_best_step(trial, item) for trial in trials],
        missed="",
    )
    missed = []
    if limits.latency_ms is not None and made.latency_ms > limits.latency_ms:
        missed.append(f"{number(made.latency_ms)} ms for a record, above {limits.latency_ms:g} ms")
    if limits.model_mb is not None and made.size_mb > limits.model_mb:
        missed.append(f"{size(made.size_mb * 1e6)}, above {size(limits.model_mb * 1e6)}")
    return replace(made, missed="; ".join(missed))


def _best_step(trial: Trial, item: Configuration) -> int:
    """Return the step of a trial's exported model: the best one if it stops early."""
    if not item.fields(families()[item.family])["training.early_stopping_patience"]:
        return trial.curve[-1][0]
    return min(trial.curve, key=lambda pair: (pair[1]["loss"], pair[0]))[0]


def _losses(table: pa.Table) -> FloatArray:
    """Return the losses of records: in nats, or squared errors."""
    own = "probabilities", SCALED
    name = "loss" if any(name in table.column_names for name in own) else "squared_error"
    found: FloatArray = table.column(name).to_numpy()
    return found


def _joined(parts: Sequence[pa.Table]) -> pa.Table:
    """Return the scores of all folds, by record, and of a record by fold, with the fold of each."""
    numbered = [
        part.append_column("fold", pa.array(np.full(part.num_rows, fold)))
        for fold, part in enumerate(parts)
    ]
    return pa.concat_tables(item.replace_schema_metadata() for item in numbered).sort_by(
        [("id", "ascending"), ("fold", "ascending")]
    )


def _out_of_fold(tables: Sequence[pa.Table]) -> OutOfFold:
    first = tables[0]
    # A record without a group is a unit of its own, in all divisions.
    ids, groups = first.column("id").to_pylist(), first.column("group").to_pylist()
    known = [group or f"\0{record}" for group, record in zip(groups, ids, strict=True)]
    units, fold = units_of(known), first.column("fold").to_numpy()
    if "probabilities" not in first.column_names:
        numbers = np.stack([table.column("predicted").to_numpy() for table in tables])
        truth, scale = first.column("target").to_numpy(), _scale(tables)
        return OutOfFold(numbers, truth, units, fold, scale=scale)
    rows = np.arange(first.num_rows)
    truth = first.column("label").to_numpy()
    chances = [_chances(table) for table in tables]
    own = np.stack([each[rows, truth] for each in chances]).astype(np.float64)
    return OutOfFold(own, None, units, fold, chances, truth.astype(np.int64))


def _scale(tables: Sequence[pa.Table]) -> FloatArray | None:
    """Return what the absolute errors of forecasts are divided by; None for other numbers.

    An exact forecast does not show it, but another configuration's does.
    """
    if SCALED not in tables[0].column_names:
        return None
    found = np.zeros(tables[0].num_rows)
    for table in tables:
        errors, scaled = (table.column(name).to_numpy() for name in ("absolute_error", SCALED))
        np.divide(errors, scaled, out=found, where=(found == 0) & (scaled > 0))
    found[found == 0] = 1.0
    return found


def _chances(table: pa.Table) -> NDArray[np.float32]:
    """Return the probabilities of joined scores: (rows, classes)."""
    lists: Any = table.column("probabilities").combine_chunks()
    flat = lists.flatten().to_numpy()
    found: NDArray[np.float32] = flat.reshape(table.num_rows, -1)
    return found


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


def best_config(study: Study, board: Board) -> RunConfig:
    """Return the configuration that trains the winner on everything but the test side.

    Its members train as many steps as in the search: the mean over the folds.
    """
    known, members = families(), list[dict[str, Any]]()
    if study.config.data.task in SERIES:
        winner = board.rows[next(iter(board.weights))].configuration
        judged = {"gate.compared": len(board.rows), "gate.promised": board.corrected}
        fields = {**winner.fields(known[winner.family]), **judged}
        return from_mapping(changed(study.config, fields))
    for place, weight in board.weights.items():
        row = board.rows[place]
        fields = row.configuration.fields(known[row.configuration.family])
        members.append(
            {
                "weight": weight,
                "framework": fields["model.framework"],
                "config": fields["model.config"],
                "max_steps": round(statistics.fmean(row.steps)),
                "learning_rate": fields["training.learning_rate"],
            }
        )
    return from_mapping(
        changed(
            study.config,
            {
                "model.framework": "ensemble",
                "model.config": {
                    "model_type": "ensemble",
                    "members": members,
                    **_calibrated(board),
                },
                "training.max_steps": len(members),
                "training.learning_rate": None,
                "training.early_stopping_patience": None,
                "training.load_best_model_at_end": False,
                "gate.compared": len(board.rows),
                "gate.promised": board.corrected,
            },
        )
    )


def _calibrated(board: Board) -> dict[str, Any]:
    """Return the settings of an ensemble that are the winner's calibration."""
    found, settings = board.calibration, dict[str, Any]()
    if found.temperature != 1:
        settings["temperature"] = found.temperature
    if found.decision:
        settings["decision"] = dict(zip(board.labels, found.decision, strict=True))
    return settings


def summary(study: Study, board: Board | None) -> dict[str, Any]:
    """Return what a search found and spent, for programs."""
    history = study.history
    finished = sum(trial.status == "finished" for trial in history.trials)
    return {
        "study": study_name(study.config),
        "quality": study.config.automl.quality,
        "folds": study.config.cross_validation.folds,
        "repeats": study.config.cross_validation.repeats,
        "metric": "squared_error" if study.config.data.task == "tabular_regression" else "loss",
        "best_params": None if board is None else shares(board),
        "best_score": None if board is None or not board.weights else board.score,
        "corrected_score": None if board is None or not board.weights else board.corrected,
        "uncalibrated_score": None if board is None or not board.weights else board.uncalibrated,
        "calibration": {} if board is None else _calibrated(board),
        "decision": _decision(study, board),
        "compared": 0 if board is None else len(board.rows),
        "better_than_default_lightgbm": None
        if board is None or board.better is None
        else {**board.better.model_dump(), "by_more_than_chance": board.better.low > 0},
        "configurations": [] if board is None else [_plain(row) for row in board.rows],
        "importance": {}
        if board is None or board.explanation is None
        else {item.column: item.loss for item in board.explanation.importances},
        "skipped": {} if board is None else dict(board.skipped),
        "trials": len(history.trials),
        "trials_completed": finished,
        "trials_failed": history.failed,
        "trials_not_started": sum(trial.status == "skipped" for trial in history.trials),
        "seconds": round(history.seconds, 3),
        "wall_seconds": history.elapsed,
        "usd": study.usd(study.hours),
    }


def _decision(study: Study, board: Board | None) -> dict[str, Any] | None:
    if board is None or not board.decided:
        return None
    likeliest, decided = board.decided
    return {"metric": study.config.automl.decision, "likeliest": likeliest, "decided": decided}


def shares(board: Board) -> dict[str, float]:
    """Return the share of each member in the winner's prediction, by name."""
    total = sum(board.weights.values())
    return {
        board.rows[place].configuration.name: weight / total
        for place, weight in board.weights.items()
    }


def _plain(row: Row) -> dict[str, Any]:
    return {
        **row.configuration.as_plain(),
        "score": row.score,
        "spread": row.spread,
        "metrics": dict(row.metrics),
        "steps": list(row.steps),
        "fit_seconds": round(row.seconds, 3),
        "latency_p50_ms": row.latency_ms,
        "latency_p99_ms": row.slowest_ms,
        "size_mb": row.size_mb,
        "missed": row.missed,
    }


def lines(board: Board | None) -> list[str]:
    """Return the board as lines of text."""
    if board is None:
        return ["", "no configuration is trained on all folds yet"]
    shown = board_rows(board)
    table = [(name, *cells) for name, cells in shown]
    text = ["", *aligned([("configuration", *HEADER), *table]), ""]
    text += [f"{label}: {said}" for label, said in verdicts(board)]
    text += [f"left out: {name}, because {reason}" for name, reason in board.skipped.items()]
    return text


HEADER: Final = ("loss", "spread", "share", "fit", "ms/record", "size", "")


def board_rows(board: Board) -> list[tuple[str, list[str]]]:
    """Return the configurations as words, the best first."""
    members = shares(board)
    return [
        (
            row.configuration.name,
            [
                number(row.score),
                number(row.spread),
                f"{members[row.configuration.name]:.0%}" if place in board.weights else "",
                duration(row.seconds),
                number(row.latency_ms),
                size(row.size_mb * 1e6),
                f"misses a limit: {row.missed}" if row.missed else "",
            ],
        )
        for place, row in enumerate(board.rows)
    ]


def verdicts(board: Board) -> Iterator[tuple[str, str]]:
    """Yield what the scores of a board are worth, each with its label."""
    if not board.weights:
        yield "winner", "no configuration keeps the constraints"
        return
    yield "winner", ", ".join(f"{name} {share:.0%}" for name, share in shares(board).items())
    yield (
        "promised",
        f"{number(board.corrected)}, corrected for the choice among {len(board.rows)} "
        f"configurations; {number(board.score)} on the records that chose",
    )
    if board.calibration.temperature != 1:
        yield (
            "calibrated",
            f"by the temperature {number(board.calibration.temperature)}; without it, the promise "
            f"would be {number(board.uncalibrated)}",
        )
    if board.decided:
        likeliest, decided = board.decided
        weights = ", ".join(
            f"{label} {number(weight)}"
            for label, weight in zip(board.labels, board.calibration.decision, strict=True)
        )
        yield (
            "decisions",
            f"promise {number(decided)}, and {number(likeliest)} if the likeliest class were "
            f"predicted; weights of the classes: {weights}",
        )
    if board.better is not None:
        low, high = board.better.low, board.better.high
        verdict = "yes" if low > 0 else "no, it is worse" if high < 0 else "no"
        yield (
            "better than default LightGBM by more than chance?",
            f"{verdict}: its loss is lower by {number(board.better.value)} "
            f"({number(low)} to {number(high)})",
        )


def write_board(study: Study, folder: Path) -> Board | None:
    """Write `board.json` and, if there is a winner, `best.yaml`; return what the search found."""
    board, place = board_of(study, folder), LocalStorage(folder)
    if board is not None and board.weights:
        place.write(BEST, best_config(study, board).to_yaml().encode())
    place.write(BOARD, f"{json.dumps(summary(study, board), indent=2)}\n".encode())
    return board
