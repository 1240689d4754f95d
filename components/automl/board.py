"""The board of a search: every configuration, the ensemble, and what its scores are worth."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from steadytrain.components.automl.design import SearchDesign
from steadytrain.components.automl.ensemble import Limit, OutOfFold, chosen, corrected
from steadytrain.components.automl.portfolio import DEFAULT, Configuration, families, portfolio
from steadytrain.components.evaluate.bootstrap import FloatArray, studentized, units_of
from steadytrain.components.evaluate.metric import point_values
from steadytrain.components.evaluate.scores import Scores
from steadytrain.components.pages.charts import aligned
from steadytrain.components.shared.config import RunConfig, from_mapping
from steadytrain.components.shared.config.space import changed
from steadytrain.components.shared.config.tune import AutoMLConstraints
from steadytrain.components.shared.quantities import duration, number, size
from steadytrain.components.shared.records import Interval
from steadytrain.components.shared.storage import LocalStorage
from steadytrain.components.tabular.artifact import Artifact
from steadytrain.components.tune.history import Trial
from steadytrain.components.tune.results import BEST
from steadytrain.components.tune.study import Study, study_name
from steadytrain.components.tune.trials.folder import ARTIFACT, TrialFolder

BOARD: Final = "board.json"
_CONFIDENCE: Final = 0.95


@dataclass(frozen=True)
class Row:
    """A configuration that was trained on all folds.

    score: mean loss over all records, each predicted by the model that did not learn from it.
    spread: standard deviation of the folds' losses.
    metrics: over all records.
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
    def size_mb(self) -> float:
        return statistics.fmean(item.size_mb for item in self.artifacts)


@dataclass(frozen=True)
class Board:
    """What a search found.

    rows: the best configuration first.
    weights: by the place of a row, how often the ensemble has it.
    score: the ensemble's mean loss on the records that chose it: too good to be true.
    corrected: the mean loss of ensembles that were chosen without the record's fold.
    better: default LightGBM's loss minus the corrected one; None without that configuration.
    skipped: why a configuration has no row, by name.
    """

    rows: Sequence[Row]
    weights: Mapping[int, int]
    score: float
    corrected: float
    better: Interval | None
    skipped: Mapping[str, str]


def fold_score(folder: Path, first: int, folds: int) -> float | None:
    """Return the mean loss of a configuration over all folds; None if one has no scores.

    Args:
        first: number of the trial with the first fold.
    """
    total, records = 0.0, 0
    for trial in range(first, first + folds):
        path = TrialFolder(folder, trial).scores
        if not path.exists():
            return None
        losses = _losses(pq.read_table(path))
        total, records = total + float(losses.sum()), records + len(losses)
    return total / records


def board_of(study: Study, folder: Path) -> Board | None:
    """Return what a search found; None if no configuration is trained on all folds.

    Args:
        folder: of the study.
    """
    limits = study.config.automl.constraints
    design = SearchDesign(study.config, study.history, lambda _: None)
    _, skipped = portfolio(limits)
    rows, tables = list[Row](), list[pa.Table]()
    for place, item in enumerate(design.configurations):
        trials = study.history.trials[place * design.folds : (place + 1) * design.folds]
        if reason := _incomplete(trials, design.folds):
            skipped[item.name] = reason
            continue
        parts = [pq.read_table(TrialFolder(folder, trial.number).scores) for trial in trials]
        rows.append(_row(item, trials, parts, limits))
        tables.append(_joined(parts))
    if not rows:
        return None
    order = sorted(range(len(rows)), key=lambda place: (rows[place].score, place))
    rows, tables = [rows[place] for place in order], [tables[place] for place in order]
    found = _out_of_fold(tables)
    usable = np.array([0.0 if not row.missed else 1.0 for row in rows])
    costs = [Limit(0.5, usable), *_limits(rows, limits)]
    rounds = 1 if limits.interpretable else 40
    weights = chosen(found, costs, rounds=rounds)
    if not weights:
        return Board(rows, {}, float("nan"), float("nan"), None, skipped)
    honest = found.losses(corrected(found, costs, rounds=rounds))
    default = [place for place, row in enumerate(rows) if row.configuration.name == DEFAULT]
    return Board(
        rows,
        dict(sorted(weights.items())),
        float(found.losses(found.mixed(weights)).mean()),
        float(honest.mean()),
        _difference(found.losses(found.predicted[default[0]]) - honest, found) if default else None,
        skipped,
    )


def _incomplete(trials: Sequence[Trial], folds: int) -> str:
    """Return why a configuration has no row."""
    for trial in trials:
        if trial.status == "failed":
            return f"failed ({trial.failure}): {trial.error.partition(chr(10))[0][:300]}"
    done = sum(trial.status == "finished" for trial in trials)
    return "" if done == folds else f"the budget ended it after {done} of {folds} folds"


def _row(
    item: Configuration,
    trials: Sequence[Trial],
    parts: Sequence[pa.Table],
    limits: AutoMLConstraints,
) -> Row:
    losses = [_losses(part) for part in parts]
    made = Row(
        item,
        score=float(np.concatenate(losses).mean()),
        spread=statistics.stdev(float(values.mean()) for values in losses),
        metrics=point_values(Scores.of(_joined(parts))),
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
    name = "loss" if "probabilities" in table.column_names else "squared_error"
    found: FloatArray = table.column(name).to_numpy()
    return found


def _joined(parts: Sequence[pa.Table]) -> pa.Table:
    """Return the scores of all folds, by record, with the fold of each."""
    numbered = [
        part.append_column("fold", pa.array(np.full(part.num_rows, fold)))
        for fold, part in enumerate(parts)
    ]
    return pa.concat_tables(item.replace_schema_metadata() for item in numbered).sort_by("id")


def _out_of_fold(tables: Sequence[pa.Table]) -> OutOfFold:
    first = tables[0]
    units, fold = units_of(first.column("group").to_pylist()), first.column("fold").to_numpy()
    if "probabilities" not in first.column_names:
        numbers = np.stack([table.column("predicted").to_numpy() for table in tables])
        return OutOfFold(numbers, first.column("target").to_numpy(), units, fold)
    rows = np.arange(first.num_rows)
    truth = first.column("label").to_numpy()
    chances = [np.array(table.column("probabilities").to_pylist())[rows, truth] for table in tables]
    return OutOfFold(np.stack(chances).astype(np.float64), None, units, fold)


def _limits(rows: Sequence[Row], limits: AutoMLConstraints) -> Iterator[Limit]:
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
                "model.config": {"model_type": "ensemble", "members": members},
                "training.max_steps": len(members),
                "training.learning_rate": None,
                "training.early_stopping_patience": None,
                "training.load_best_model_at_end": False,
                "gate.compared": len(board.rows),
            },
        )
    )


def summary(study: Study, board: Board | None) -> dict[str, Any]:
    """Return what a search found and spent, for programs."""
    history = study.history
    finished = sum(trial.status == "finished" for trial in history.trials)
    return {
        "study": study_name(study.config),
        "quality": study.config.automl.quality,
        "folds": study.config.cross_validation.folds,
        "metric": "loss" if study.config.data.task == "tabular_classification" else "squared_error",
        "best_params": None if board is None else _members(board),
        "best_score": None if board is None or not board.weights else board.score,
        "corrected_score": None if board is None or not board.weights else board.corrected,
        "compared": 0 if board is None else len(board.rows),
        "better_than_default_lightgbm": None
        if board is None or board.better is None
        else {**board.better.model_dump(), "by_more_than_chance": board.better.low > 0},
        "configurations": [] if board is None else [_plain(row) for row in board.rows],
        "skipped": {} if board is None else dict(board.skipped),
        "trials": len(history.trials),
        "trials_completed": finished,
        "trials_failed": history.failed,
        "seconds": round(history.seconds, 3),
        "usd": study.usd(study.hours),
    }


def _members(board: Board) -> dict[str, float]:
    total = sum(board.weights.values())
    return {
        board.rows[place].configuration.name: weight / total
        for place, weight in board.weights.items()
    }


def _plain(row: Row) -> dict[str, Any]:
    mean = statistics.fmean
    return {
        **row.configuration.as_plain(),
        "score": row.score,
        "spread": row.spread,
        "metrics": dict(row.metrics),
        "steps": list(row.steps),
        "fit_seconds": round(row.seconds, 3),
        "latency_p50_ms": mean(item.latency_p50_ms for item in row.artifacts),
        "latency_p99_ms": mean(item.latency_p99_ms for item in row.artifacts),
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
    shares = _members(board)
    return [
        (
            row.configuration.name,
            [
                number(row.score),
                number(row.spread),
                f"{shares[row.configuration.name]:.0%}" if place in board.weights else "",
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
    yield "winner", ", ".join(f"{name} {share:.0%}" for name, share in _members(board).items())
    yield (
        "promised",
        f"{number(board.corrected)}, corrected for the choice among {len(board.rows)} "
        f"configurations; {number(board.score)} on the records that chose",
    )
    if board.better is not None:
        low, high = board.better.low, board.better.high
        verdict = "yes" if low > 0 else "no, it is worse" if high < 0 else "no"
        yield (
            "better than default LightGBM by more than chance?",
            f"{verdict}: its loss is lower by {number(board.better.value)} "
            f"({number(low)} to {number(high)})",
        )


def write_board(study: Study, folder: Path) -> None:
    """Write `board.json` and, if there is a winner, `best.yaml`."""
    board, place = board_of(study, folder), LocalStorage(folder)
    if board is not None and board.weights:
        place.write(BEST, best_config(study, board).to_yaml().encode())
    place.write(BOARD, f"{json.dumps(summary(study, board), indent=2)}\n".encode())
