"""What a search writes: its board as a record and as text, and the configuration of the winner."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from steadytrain.components.automl.board import (
    FREQUENCIES,
    LIGHTGBM,
    Board,
    Row,
    alone_in,
    board_of,
    shares,
)
from steadytrain.components.automl.portfolio import DEFAULT, families
from steadytrain.components.pages.charts import aligned
from steadytrain.components.shared.config import RunConfig, from_mapping
from steadytrain.components.shared.config.space import changed
from steadytrain.components.shared.quantities import duration, money, number, size
from steadytrain.components.shared.records import Interval
from steadytrain.components.shared.storage import LocalStorage
from steadytrain.components.train.framework.ensemble import SCHEDULED
from steadytrain.components.tune.results import BEST
from steadytrain.components.tune.study import Study, study_name

BOARD: Final = "board.json"
_NO_STEPS: Final = -1
"""The value of `training.max_steps` with which the epochs count."""
_METRICS: Final = {"tabular_regression": "squared_error", "forecasting": "mase"}
"""The metric that scores are, where it is not the loss in nats."""


FIGURES: Final = (
    "best_score",
    "corrected_score",
    "compared",
    "trials_completed",
    "trials_failed",
)
"""What MLflow and Kubeflow show of a board, by the names of `summary`."""


def best_config(study: Study, board: Board, *, epochs: bool = False) -> RunConfig:
    """Return the configuration that trains the winner on everything but the test side.

    Its members train as many steps as in the search: the mean over the folds. What no ensemble has,
    such as networks and forecasts by a package's own framework, is trained as in the search.

    Args:
        epochs: whether its length is `training.num_train_epochs`. A study counts the steps of a
            unit, and the winner learns from more records.
    """
    known, members = families(), list[dict[str, Any]]()
    judged = {"gate.compared": len(board.rows), "gate.promised": board.corrected}
    first = board.rows[next(iter(board.weights))].configuration
    if alone_in(study.config, [first]):
        fields = {**first.fields(known[first.family]), **judged}
        if epochs:
            fields["training.max_steps"] = _NO_STEPS
        return from_mapping(changed(study.config, fields))
    for index, weight in board.weights.items():
        row = board.rows[index]
        fields = row.configuration.fields(known[row.configuration.family])
        members.append(
            {
                "weight": weight,
                "framework": fields["model.framework"],
                "config": fields["model.config"],
                "max_steps": round(statistics.fmean(row.steps)),
                **_scheduled(fields),
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
                **judged,
            },
        )
    )


def _scheduled(fields: Mapping[str, Any]) -> dict[str, int]:
    """Return the steps of a member's schedule, if it has one: those of its units."""
    is_scheduled = fields["model.framework"] == SCHEDULED
    return {"schedule_steps": fields["training.max_steps"]} if is_scheduled else {}


def _calibrated(board: Board) -> dict[str, Any]:
    """Return the settings of an ensemble that are the winner's calibration."""
    calibration, settings = board.calibration, dict[str, Any]()
    if calibration.temperature != 1:
        settings["temperature"] = calibration.temperature
    if calibration.isotonic:
        settings["isotonic"] = [[list(one.at), list(one.values)] for one in calibration.isotonic]
    if calibration.decision:
        settings["decision"] = dict(zip(board.labels, calibration.decision, strict=True))
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
        "metric": _METRICS.get(study.config.data.task, "loss"),
        "best_params": None if board is None else shares(board),
        "best_score": None if board is None or not board.weights else board.score,
        "corrected_score": None if board is None or not board.weights else board.corrected,
        "uncalibrated_score": None if board is None or not board.weights else board.uncalibrated,
        "calibration": {} if board is None else _calibrated(board),
        "decision": _decision(study, board),
        "compared": 0 if board is None else len(board.rows),
        "better_than_default_lightgbm": _gain(board, LIGHTGBM),
        "better_than_frequencies": _gain(board, FREQUENCIES),
        "configurations": [] if board is None else [_plain(row) for row in board.rows],
        "importance": {}
        if board is None or board.explanation is None
        else {item.column: item.loss for item in board.explanation.importances},
        "skipped": {} if board is None else dict(board.skipped),
        "trials": len(history.trials),
        "trials_completed": finished,
        "trials_failed": history.failed,
        "trials_not_started": history.not_started,
        "seconds": round(history.seconds, 3),
        "wall_seconds": history.elapsed,
        "usd": study.usd(study.hours),
    }


def _gain(board: Board | None, baseline: str) -> dict[str, float | bool | None] | None:
    if board is None or board.better is None or board.baseline != baseline:
        return None
    return {**_ends(board.better), "by_more_than_chance": board.better.low > 0}


def _ends(interval: Interval) -> dict[str, float | None]:
    """Return an interval for JSON, which has no NaN."""
    known: dict[str, float] = interval.model_dump()
    return {name: value if math.isfinite(value) else None for name, value in known.items()}


def _decision(study: Study, board: Board | None) -> dict[str, Any] | None:
    if board is None or not board.decided:
        return None
    likeliest, decided = board.decided
    return {"metric": study.config.automl.decision, "likeliest": likeliest, "decided": decided}


def _plain(row: Row) -> dict[str, Any]:
    return {
        **row.configuration.as_plain(),
        "score": row.score,
        "spread": row.spread,
        "metrics": dict(row.metrics),
        "steps": list(row.steps),
        "fit_seconds": round(row.seconds, 3),
        "usd": row.usd,
        "peak_memory_mb": row.peak_mb,
        "latency_p50_ms": row.latency_ms,
        "latency_p99_ms": row.slowest_ms,
        "memory_mb": row.memory_mb,
        "size_mb": row.size_mb,
        "missed": row.missed,
    }


def write_board(study: Study, folder: Path, *, epochs: bool = False) -> Board | None:
    """Write `board.json` and, if there is a winner, `best.yaml`; return what the search found.

    Args:
        epochs: see `best_config`.
    """
    board, storage = board_of(study, folder), LocalStorage(folder)
    if board is not None and board.weights:
        storage.write(BEST, best_config(study, board, epochs=epochs).to_yaml().encode())
    storage.write(BOARD, f"{json.dumps(summary(study, board), indent=2)}\n".encode())
    return board


def lines(board: Board | None) -> list[str]:
    """Return the board as lines of text."""
    if board is None:
        return ["", "no configuration is trained on all folds yet"]
    shown = board_rows(board)
    table = [(name, *cells) for name, cells in shown]
    text = ["", *aligned([("configuration", *_HEADER), *table]), ""]
    text += [f"{label}: {verdict}" for label, verdict in verdicts(board)]
    text += [f"left out: {name}, because {reason}" for name, reason in board.skipped.items()]
    return text


_HEADER: Final = [
    *("loss", "spread", "share", "fit", "cost"),
    *("peak memory", "ms/record", "memory", "size", ""),
]


def costs(row: Row) -> list[str]:
    """Return as words what training took: time, USD or else hours, and memory at its peak."""
    cost = f"{number(row.seconds / 3600)} h" if row.usd is None else money(row.usd)
    return [duration(row.seconds), cost, size(row.peak_mb * 1e6)]


def memory(row: Row) -> str:
    """Return as words what an exported model takes; "" if that is unknown."""
    return "" if row.memory_mb is None else size(row.memory_mb * 1e6)


def board_rows(board: Board) -> list[tuple[str, list[str]]]:
    """Return the configurations as words, the best first."""
    members = shares(board)
    return [
        (
            row.configuration.name,
            [
                number(row.score),
                number(row.spread),
                f"{members[row.configuration.name]:.0%}" if index in board.weights else "",
                *costs(row),
                number(row.latency_ms),
                memory(row),
                size(row.size_mb * 1e6),
                f"misses a limit: {row.missed}" if row.missed else "",
            ],
        )
        for index, row in enumerate(board.rows)
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
    calibration, how = board.calibration, ""
    if calibration.isotonic:
        points = sum(len(one.at) for one in calibration.isotonic)
        how = f"isotonic regression, {points:,} points"
    elif calibration.temperature != 1:
        how = f"the temperature {number(calibration.temperature)}"
    if how:
        without = f"without it, the promise would be {number(board.uncalibrated)}"
        yield "calibrated", f"by {how}; {without}"
    if board.decided:
        likeliest, decided = board.decided
        other, what = (
            ("each label from a half on", "thresholds of the labels")
            if board.sets
            else ("the likeliest class", "weights of the classes")
        )
        weights = ", ".join(
            f"{label} {number(weight)}"
            for label, weight in zip(board.labels, board.calibration.decision, strict=True)
        )
        yield (
            "decisions",
            f"promise {number(decided)}, and {number(likeliest)} if {other} were predicted; "
            f"{what}: {weights}",
        )
    yield f"better than {board.baseline} by more than chance?", _better(board)


def _better(board: Board) -> str:
    if board.better is None:
        return f"not compared: {board.skipped.get(DEFAULT, 'it is not in the portfolio')}"
    value, low, high = board.better.value, board.better.low, board.better.high
    lower = f"its loss is {'lower' if value >= 0 else 'higher'} by {number(abs(value))}"
    if math.isnan(low):
        return f"undecided: {lower}, and too few records, groups or times are independent"
    verdict = "yes" if low > 0 else "no, it is worse" if high < 0 else "no"
    ends = (low, high) if value >= 0 else (-high, -low)
    return f"{verdict}: {lower} ({' to '.join(map(number, ends))})"
