"""The report of a search, as a page and in MLflow."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from markupsafe import Markup

from steadytrain.components.automl.board import Board, Row, shares
from steadytrain.components.automl.explanation import NORMAL, Dependence, Explanation
from steadytrain.components.automl.forecasts import forecast_figures
from steadytrain.components.automl.judgment import add_judgment
from steadytrain.components.automl.results import (
    BOARD,
    FIGURES,
    costs,
    memory,
    verdicts,
    write_board,
)
from steadytrain.components.pages.charts import (
    WIDE,
    WIDTH,
    Figure,
    Series,
    intervals,
    nice_ticks,
    plot,
    scatter,
    tick_label,
)
from steadytrain.components.pages.evaluation_section import evaluation_section, gate_section
from steadytrain.components.shared.errors import SteadytrainError
from steadytrain.components.shared.quantities import number, size
from steadytrain.components.shared.records import EvaluationRecord, GateRecord
from steadytrain.components.shared.tracking.connect import open_tracking, tracking_errors
from steadytrain.components.shared.tracking.notes import RUN, recall
from steadytrain.components.shared.workspace import Workspace
from steadytrain.components.tune.results import BEST
from steadytrain.components.tune.study import Study, study_name
from steadytrain.components.tune.study_page import PAGE, study_html, time_tile, write_page
from steadytrain.components.tune.tracking import STUDY, StudyWorkspace

_BARS: Final = 20
"""Columns whose importance is shown."""
_DEPENDENCE: Final = 6
"""The most important columns, whose effect is shown."""
_CLASSES: Final = 6
"""Classes of a figure, so that their lines differ visibly."""
_DOTS: Final = 1000
_LOSSES: Final = {
    "tabular_regression": "a squared error",
    "forecasting": "an absolute error, in errors of the seasonal naive forecast (MASE)",
}
"""What the loss of a record is; in nats for other tasks."""


def write_search(study: Study, folder: Path, *, epochs: bool = False) -> None:
    """Write the board of a search, `best.yaml` and the page.

    Args:
        folder: of the study.
        epochs: see `best_config`.
    """
    write_page(render(study, write_board(study, folder, epochs=epochs), None), folder)


def finish(study: Study, board: Board, folder: Path, judgment: Mapping[str, Any]) -> str:
    """Write how the winner was judged, to the board and the page, and send both to MLflow.

    Args:
        judgment: see `judged`.

    Returns:
        Why MLflow did not get them, or "".
    """
    add_judgment(judgment, folder)
    write_page(render(study, board, judgment), folder)
    return _logged(study, folder, judgment["run"])


def render(study: Study, board: Board | None, judgment: Mapping[str, Any] | None) -> str:
    """Return the page as HTML."""
    workspace = Workspace(Path(study.config.output), judgment["run"]) if judgment else None
    verdict_lines = [] if board is None else list(verdicts(board))
    return study_html(
        "automl",
        study,
        sentence=_sentence(study, board),
        tiles=_tiles(study, board, judgment),
        verdicts=[
            (label[0].upper() + label[1:], text)
            for label, text in verdict_lines
            if label != "winner"
        ]
        + ([("Limits", _missed(judgment))] if judgment and judgment["missed"] else []),
        rows=[] if board is None else _rows(board),
        loss=_LOSSES.get(study.config.data.task, "in nats"),
        skipped=[] if board is None else list(board.skipped.items()),
        figures=[]
        if board is None
        else [_quality_by_latency(board), *forecast_figures(board.forecasts), *_residuals(board)],
        explanation=_explained(board),
        artifact=judgment and judgment["artifact"],
        evaluation=workspace
        and evaluation_section(EvaluationRecord.load(workspace.record("evaluate"))),
        gate=workspace and gate_section(GateRecord.load(workspace.record("gate"))),
        compared=judgment and judgment["test"]["compared"],
    )


def _missed(judgment: Mapping[str, Any]) -> str:
    return f"the registered model misses one: {judgment['missed']}"


def _sentence(study: Study, board: Board | None) -> str:
    if board is None:
        return "No configuration is trained on all folds yet."
    if not board.weights:
        return "No configuration keeps the constraints."
    parts = [f"{name} ({share:.0%})" for name, share in shares(board).items()]
    what = parts[0].rpartition(" (")[0] if len(parts) == 1 else f"An ensemble of {', '.join(parts)}"
    return f"{what} predicts {', '.join(study.config.data.targets) or 'the class'} best."


def _tiles(
    study: Study, board: Board | None, judgment: Mapping[str, Any] | None
) -> Iterator[tuple[str, str, str]]:
    if judgment:
        test = judgment["test"]
        name = test["metric"]
        value = test["metrics"][name]
        words = f"{number(value['low'])} to {number(value['high'])}"
        yield f"Test {name.replace('_', ' ')}", number(value["value"]), words
        verdict = "promoted" if test["promoted"] else "not promoted"
        yield "Gate", verdict, f"{test['compared']} configurations compared"
    if board and board.weights:
        yield "Corrected loss", number(board.corrected), "chosen without the record's fold"
        yield "Optimistic loss", number(board.score), "on the records that chose"
    if board and board.better:
        low = board.better.low
        verdict = "undecided" if math.isnan(low) else "yes" if low > 0 else "no"
        yield f"Better than {board.baseline}", verdict, "by more than chance"
    finished = sum(trial.status == "finished" for trial in study.history.trials)
    yield "Units", f"{finished:,}", f"{study.history.failed:,} failed"
    yield time_tile(study)


def _rows(board: Board) -> list[tuple[str, list[str]]]:
    members = shares(board)
    return [
        (
            row.configuration.name,
            [
                f"{members[row.configuration.name]:.0%}" if index in board.weights else "",
                number(row.score),
                number(row.spread),
                *costs(row),
                number(row.latency_ms),
                number(row.slowest_ms),
                memory(row),
                size(row.size_mb * 1e6),
                f"misses a limit: {row.missed}; {_settings(row)}" if row.missed else _settings(row),
            ],
        )
        for index, row in enumerate(board.rows)
    ]


def _settings(row: Row) -> str:
    given = row.configuration.settings.items()
    return ", ".join(f"{name} {number(it) if isinstance(it, float) else it}" for name, it in given)


def _quality_by_latency(board: Board) -> Figure:
    """Draw losses by latency, and a line through the Pareto front.

    An ensemble, which takes as long as its members together, is a point like each configuration.
    """
    points = [
        (
            row.latency_ms,
            row.score,
            row.configuration.name,
            "trial failed"
            if row.missed
            else "trial best"
            if index in board.weights
            else "trial finished",
        )
        for index, row in enumerate(board.rows)
    ]
    if len(board.weights) > 1:
        latency = sum(board.rows[index].latency_ms for index in board.weights)
        points.append((latency, board.score, "the ensemble", "trial best"))
    front, on_front = list[tuple[float, float]](), list[str]()
    for latency, loss, name, _ in sorted(points):
        if not front or loss < front[-1][1]:
            front += [(latency, front[-1][1])] if front else []
            front.append((latency, loss))
            on_front.append(name)
    dots = [
        Series(
            kind,
            dots=[((latency, loss), f"{name}: loss {number(loss)}, {number(latency)} ms")],
        )
        for latency, loss, name, kind in points
    ]
    return Figure(
        "Loss by time for a record",
        scatter(
            "Loss by time for a record", dots, "ms, log scale", log=True, through=front, width=WIDE
        ),
        [],
        f"The line is the Pareto front: {', '.join(on_front)}. Orange: in the winner; red: misses "
        "a limit.",
    )


def _residuals(board: Board) -> Iterator[Figure]:
    """Yield the errors by the prediction."""
    if not board.numbers:
        return
    points = [(predicted, truth - predicted) for predicted, truth in board.numbers]
    drawn = points[:: max(1, len(points) // _DOTS)]
    dots = [(point, f"predicted {number(point[0])}, off by {number(point[1])}") for point in drawn]
    title = "Residuals on held-out folds"
    low, high = min(x for x, _ in drawn), max(x for x, _ in drawn)
    chart = scatter(
        title,
        [Series("trial finished", dots=dots)],
        "prediction",
        through=[(low, 0), (high, 0)],
        width=WIDE,
    )
    yield Figure(title, chart, [], "the true number minus the prediction, by the prediction")


def _explained(board: Board | None) -> dict[str, Any] | None:
    if board is None or board.explanation is None:
        return None
    explanation = board.explanation
    return {
        "records": f"{explanation.records:,}",
        "left_out": explanation.left_out,
        "chart": _importance(explanation),
        "others": max(0, len(explanation.importances) - _BARS),
        "figures": [
            _dependence(item.column, explanation.dependence[item.column], board)
            for item in explanation.importances
            if item.column in explanation.dependence and len(explanation.dependence[item.column].at)
        ][:_DEPENDENCE],
    }


def _importance(found: Explanation) -> Markup:
    rows = [
        (
            item.column[:28],
            item.loss - NORMAL * item.error,
            item.loss,
            item.loss + NORMAL * item.error,
            "finished" if item.loss > NORMAL * item.error else "stopped",
        )
        for item in found.importances[:_BARS]
    ]
    return intervals("How much the loss rises without a column", rows)


def _dependence(column: str, found: Dependence, board: Board) -> Figure:
    """Draw the mean prediction by a column's value."""
    # With two classes, the second one is enough.
    lines = found.values.T.tolist()
    names = list(board.labels)
    if len(names) == 2 and not board.sets:
        lines, names = lines[1:], names[1:]
    lines, names = lines[:_CLASSES], names[:_CLASSES]
    across = [value if isinstance(value, float) else float(n) for n, value in enumerate(found.at)]
    said = [value if isinstance(value, str) else number(value) for value in found.at]
    named, series = isinstance(found.at[0], str), list[Series]()
    for n, line in enumerate(lines):
        points = list(zip(across, line, strict=True))
        dots = [
            (point, f"{at}: {number(point[1])}") for point, at in zip(points, found.at, strict=True)
        ]
        # Between categories there is nothing.
        series.append(Series(f"line c{n}", () if named else points, dots=dots))
    low, high = min(across), max(across)
    pad = (high - low) * 0.04 or 0.5
    labels_below = (
        [(at, name[:9]) for at, name in zip(across, said, strict=True)]
        if named
        else [(tick, tick_label(tick)) for tick in nice_ticks(low, high, 4) if low <= tick <= high]
    )
    values = [value for line in lines for value in line]
    what = f"probability of {names[0]}" if len(names) == 1 else "probability" if names else "number"
    chart = plot(
        column,
        f"mean prediction by {column}",
        series,
        axis=column[:40],
        x=(low - pad, high + pad),
        labels=labels_below,
        ticks=nice_ticks(min(values), max(values)),
        width=WIDTH,
    )
    return Figure(column, chart, names if len(names) > 1 else [], f"mean predicted {what}")


def _logged(study: Study, folder: Path, run: str) -> str:
    """Send the page, the board and `best.yaml` to the MLflow runs of the search and its winner.

    The search's run also gets the figures of the board.

    Args:
        run: the winner's.

    Returns:
        Why MLflow did not get them, or "".
    """
    config = study.config
    if "mlflow" not in config.tracking.sinks or find_spec("mlflow") is None:
        return ""
    output = Path(config.output).absolute()
    figures = json.loads((folder / BOARD).read_bytes())
    places = [
        (StudyWorkspace(output, study_name(config)), STUDY),
        (Workspace(output, run), RUN),
    ]
    try:
        for workspace, note in places:
            tracking = open_tracking(config, workspace)
            if run_id := recall(workspace, note):
                with tracking_errors(tracking.uri):
                    for name in (PAGE, BOARD, BEST):
                        tracking.client.log_artifact(run_id, str(folder / name), "automl")
                    if note == STUDY:
                        for name in FIGURES:
                            tracking.client.log_metric(run_id, name, figures[name])
                        best = json.dumps(figures["best_params"])
                        tracking.client.set_tag(run_id, "steadytrain.best_params", best)
    except SteadytrainError as error:
        return error.message
    return ""
