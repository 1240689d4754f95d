"""An evaluation and the gate as tables and figures: for the evaluation's page and the report.

The loss around the trained weights is a map with contour lines, as inline SVG.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

from markupsafe import Markup

from steadytrain.components.pages.charts import Figure, Point, label, shape, share_chart, svg
from steadytrain.components.shared.quantities import number, percent
from steadytrain.components.shared.records import (
    EvaluationRecord,
    GateRecord,
    Interval,
    LandscapeRecord,
)

MATRIX_CLASSES: Final = 25
"""With more classes than this, a matrix is unreadable, so only the worst confusions are listed."""
_DIRECTIONS: Final = {True: "higher is better", False: "lower is better", None: ""}


def evaluation_section(record: EvaluationRecord, classes: int = MATRIX_CLASSES) -> dict[str, Any]:
    """Return metrics with intervals and baselines, lm-eval tasks, classes, confusions, slices.

    Args:
        classes: with more than these there is no confusion matrix.
    """
    baselines = {name: _baselines(record, name) for name in record.metrics}
    known = {name for scores in baselines.values() for name in scores}
    metrics = [
        (
            name,
            [
                number(metric.value),
                interval(metric),
                ", ".join(
                    f"{number(value)} {baseline.removesuffix(name).strip('_')}".strip()
                    for baseline, value in baselines[name].items()
                ),
            ],
        )
        for name, metric in record.metrics.items()
    ]
    metrics += [
        (name, ["", "", number(value)])
        for name, value in record.baselines.items()
        if name not in known
    ]
    return {
        "examples": number(record.examples),
        "metrics": metrics,
        "robustness": [
            (
                f"{name}, {condition.replace('_', ' ')}",
                [number(metric.value), interval(metric), number(record.unperturbed(name))],
            )
            for condition, metrics in record.robustness.items()
            for name, metric in metrics.items()
        ],
        "tasks": [
            (
                name,
                [
                    *map(number, (score.value, score.stderr, score.examples)),
                    _DIRECTIONS[score.greater_is_better],
                ],
            )
            for name, score in record.tasks.items()
        ],
        "figures": [*_calibration(record), *_precision_and_recall(record)],
        "landscape": _landscape(record.landscape) if record.landscape else None,
        "landscape_missing": record.landscape_missing,
        "classes": _table(record.per_class),
        "slices": _table(record.slices),
        "matrix": _matrix(record) if len(record.labels) <= classes else None,
        "confusions": _confusions(record),
    }


def gate_section(record: GateRecord) -> dict[str, Any]:
    """Return the decision with all its numbers."""
    direction = "higher" if record.greater_is_better else "lower"
    rows = [(f"Candidate's {record.metric}", number(record.candidate), f"{direction} is better")]
    if record.champion is not None:
        against = f"version {record.champion_version}, on the same records"
        rows.append((f"Champion's {record.metric}", number(record.champion), against))
    elif record.champion_version is not None:
        rows.append(("Champion", f"version {record.champion_version}", "not compared"))
    else:
        rows.append(("Champion", "none", "the baseline and the floors decide"))
    if record.improvement is not None:
        low, high = percent(record.improvement.low), percent(record.improvement.high)
        rows.append(("Improvement", percent(record.improvement.value), f"{low} to {high}"))
    for item in record.comparisons:
        ends = f"{percent(item.improvement.low)} to {percent(item.improvement.high)}"
        value = percent(item.improvement.value)
        rows.append((f"Improvement over {item.what}", value, f"{ends}, by {item.metric}"))
    if record.base_not_compared:
        rows.append(("Improvement over model.base", "not compared", record.base_not_compared))
    if record.units:
        noun = "model was" if record.earlier == 1 else "models were"
        rows.append(
            (
                "Test examples",
                number(record.units),
                f"independent ones; {number(record.earlier)} other {noun} judged on them before",
            )
        )
        rows.append(("Level of the intervals", percent(record.confidence), "after the corrections"))
    rows.append(
        ("Required margin", percent(record.margin), "which the interval's lower end must exceed")
    )
    rows += [
        (f"Floor for {name}", number(value), "the worst value allowed")
        for name, value in record.floors.items()
    ]
    rows += [
        (f"Improvement in slice {name}", percent(value), "relative to the champion")
        for name, value in record.slices.items()
    ]
    return {
        "reason": record.reason,
        "rows": [(name, [value, note]) for name, value, note in rows],
    }


def interval(metric: Interval) -> str:
    """Format a confidence interval."""
    return f"{number(metric.low)} to {number(metric.high)}"


def _baselines(record: EvaluationRecord, metric: str) -> dict[str, float]:
    """Return a metric's baselines. Their names are the metric's or end in it, like unigram_loss."""
    return {
        name: value
        for name, value in record.baselines.items()
        if name == metric or name.endswith(f"_{metric}")
    }


def _table(rows: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
    columns = list(dict.fromkeys(name for row in rows.values() for name in row))
    return {
        "columns": [name.replace("_", " ") for name in columns],
        "rows": [
            (name, [number(values.get(column)) for column in columns])
            for name, values in rows.items()
        ],
    }


def _calibration(record: EvaluationRecord) -> Iterator[Figure]:
    if not record.calibration:
        return
    error = record.metrics.get("ece")
    said = "; ".join(
        f"{percent(item.confidence)} confidence, {percent(item.accuracy)} correct "
        f"({number(item.examples)} examples)"
        for item in record.calibration
    )
    points = [(item.confidence, item.accuracy) for item in record.calibration]
    ideal = [(0.0, 0.0), (1.0, 1.0)]
    chart = share_chart("Calibration", said, [points, ideal], "confidence")
    caption = "share of correct predictions by the model's confidence"
    if error is not None:
        caption += f"; expected calibration error {number(error.value)}"
    yield Figure("Calibration", chart, ["accuracy", "ideal"], caption)


def _precision_and_recall(record: EvaluationRecord) -> Iterator[Figure]:
    """Yield precision by recall of the classes with the worst results."""
    for name, points in record.curves.items():
        area = record.per_class.get(name, {}).get("average_precision")
        caption = f"precision by recall; average precision {number(area)}"
        title = f"Precision and recall: {name}"
        yield Figure(title, share_chart(title, caption, [points], "recall"), [], caption)


def _landscape(found: LandscapeRecord) -> dict[str, Any]:
    """Return the map of the loss around the trained weights, and its profile by distance."""
    caption = (
        f"{landscape_words(found)}. {number(found.records)} test records; the cross is the "
        f"trained model, and a step of 1 is as long as its weights, filter by filter."
    )
    chart = landscape_map(found)
    return {
        "figures": [Figure("Loss landscape", chart, [], caption)] if chart else [],
        "columns": ["Lowest loss", "Mean loss", "Highest loss", "Not finite"],
        "rows": [
            (
                number(ring.distance),
                [*map(number, (ring.lowest, ring.mean, ring.highest)), str(ring.not_finite or "")],
            )
            for ring in found.profile
        ],
    }


def _matrix(record: EvaluationRecord) -> dict[str, Any] | None:
    """Return counts, with each cell's share of its true class for the color."""
    if not record.confusion:
        return None
    rows = []
    for name, counts in zip(record.labels, record.confusion, strict=False):
        total = sum(counts) or 1
        rows.append((name, [(number(count), round(count / total, 3)) for count in counts]))
    return {"labels": record.labels, "rows": rows}


def _confusions(record: EvaluationRecord, limit: int = 10) -> list[tuple[str, list[str]]]:
    """Return the most frequent mistakes: true class, predicted class, count."""
    pairs = [
        (count, true, predicted)
        for true, counts in enumerate(record.confusion)
        for predicted, count in enumerate(counts)
        if count and true != predicted
    ]
    pairs.sort(reverse=True)
    return [
        (record.labels[true], [record.labels[predicted], number(count)])
        for count, true, predicted in pairs[:limit]
    ]


_COLORS: Final = (
    *("#00224e", "#123570", "#3b496c", "#575d6d", "#707173"),
    *("#8a8678", "#a59c74", "#c3b369", "#e1cc55", "#fee838"),
)
"""Cividis: with and without color blindness, lighter means more (Nunez et al. 2018)."""
_WIDTH, _HEIGHT, _LEFT, _TOP, _SIDE = 440, 300, 62, 12, 244
_BAR, _BAR_WIDTH, _BAR_PIECES = 334, 14, 48
_CONTOURS: Final = 8
_TIMES: Final = 10
"""If the largest loss is more than this many times the smallest, colors follow the logarithm."""


@dataclass(frozen=True)
class Shades:
    """Maps a loss to a share of the color bar, 0 to 1."""

    low: float
    high: float
    logarithmic: bool

    @classmethod
    def of(cls, losses: Sequence[float]) -> Shades:
        low, high = min(losses), max(losses)
        return cls(low, high, logarithmic=low > 0 and high / low > _TIMES)

    def __call__(self, loss: float) -> float:
        low, high, loss = (self._scaled(value) for value in (self.low, self.high, loss))
        return (loss - low) / (high - low) if high > low else 0.0

    def loss(self, share: float) -> float:
        """Return the loss of a share of the color bar."""
        low, high = self._scaled(self.low), self._scaled(self.high)
        value = low * (1 - share) + high * share
        return math.exp(value) if self.logarithmic else 2 * value

    def _scaled(self, loss: float) -> float:
        # Half, so that the difference of the largest floats stays finite.
        return math.log(loss) if self.logarithmic else loss / 2


def landscape_map(found: LandscapeRecord) -> Markup:
    """Return the map as SVG, or "" if no loss is finite.

    Each square is a point of the grid, and its tooltip has the numbers. The cross in the middle is
    the trained model.
    """
    finite = [value for line in found.losses for value in line if value is not None]
    if not finite:
        return Markup("")
    shades = Shades.of(finite)
    # Crisp edges, so that no background shines through between two squares.
    squares = Markup("").join([*_squares(found, shades), *_bar()])
    parts = [Markup('<g shape-rendering="crispEdges">{}</g>').format(squares)]
    parts += [*_contours(found, shades), *_cross(), *_axes(found), *_scale(shades)]
    return svg("Loss landscape", landscape_words(found), parts, _WIDTH, _HEIGHT, "landscape")


def landscape_words(found: LandscapeRecord) -> str:
    """Return the map in words: the loss in the middle, at the edge, and where it is lowest."""
    middle, edge = found.profile[0], found.profile[-1]
    sentences = [f"Loss {number(middle.mean)} at the trained weights"]
    if edge.lowest is not None:
        sentences.append(
            f"{number(edge.lowest)} to {number(edge.highest)} at a distance of "
            f"{number(edge.distance)}"
        )
    lowest = min(
        (ring for ring in found.profile if ring.lowest is not None),
        key=lambda ring: ring.lowest or 0.0,
        default=None,
    )
    if lowest is not None:
        sentences.append(f"lowest at a distance of {number(lowest.distance)}")
    if broken := sum(ring.not_finite for ring in found.profile):
        sentences.append(f"not finite at {broken} of {len(found.steps) ** 2} points")
    return ", ".join(sentences)


def _lower_left(column: float, row: float, size: float) -> Point:
    """Return the pixels of a square's corner."""
    return _LEFT + column * size, _TOP + _SIDE - row * size


def _squares(found: LandscapeRecord, shades: Shades) -> Iterator[Markup]:
    size = _SIDE / len(found.steps)
    for row, (second, line) in enumerate(zip(found.steps, found.losses, strict=True)):
        for column, (first, loss) in enumerate(zip(found.steps, line, strict=True)):
            x, y = _lower_left(column, row + 1, size)
            at = f"{number(first)}, {number(second)}"
            if loss is None:
                path = f"M{x:.1f} {y:.1f} l{size:.1f} {size:.1f} m0 {-size:.1f} "
                path += f"l{-size:.1f} {size:.1f}"
                yield shape("path", f"{at}: not finite", class_="broken-point", d=path)
            else:
                yield _square(x, y, size, size, shades(loss), f"{at}: {number(loss)}")


def _square(x: float, y: float, width: float, height: float, share: float, title: str) -> Markup:
    size = {"width": width + 0.3, "height": height + 0.3}
    return shape("rect", title, x=x, y=y, **size, fill=_color(share))


def _color(share: float) -> str:
    position = min(max(share, 0.0), 1.0) * (len(_COLORS) - 1)
    index = min(int(position), len(_COLORS) - 2)
    pairs = zip(_channels(_COLORS[index]), _channels(_COLORS[index + 1]), strict=True)
    mixed = [round(low + (high - low) * (position - index)) for low, high in pairs]
    return "#" + "".join(f"{value:02x}" for value in mixed)


def _channels(color: str) -> bytes:
    return bytes.fromhex(color[1:])


def _contours(found: LandscapeRecord, shades: Shades) -> Iterator[Markup]:
    """Yield one path for each level: dark lines on light squares, light lines on dark ones."""
    shares = [[None if loss is None else shades(loss) for loss in line] for line in found.losses]
    size = _SIDE / len(found.steps)
    for level in (index / _CONTOURS for index in range(1, _CONTOURS)):
        path = ""
        for piece in crossings(shares, level):
            for command, (column, row) in zip("ML", piece, strict=True):
                x, y = _lower_left(column + 0.5, row + 0.5, size)
                path += f"{command}{x:.1f} {y:.1f} "
        if path:
            color = "#ffffff" if level < 0.55 else "#1c2024"
            title = f"contour at {number(shades.loss(level))}"
            yield shape("path", title, class_="contour", d=path.strip(), stroke=color)


def crossings(
    values: Sequence[Sequence[float | None]], level: float
) -> Iterator[tuple[Point, Point]]:
    """Yield the pieces of a contour line, (column, row) to (column, row), by marching triangles.

    Each square between four points is cut into four triangles around its middle, whose value is the
    mean. A plane through three corners has one straight line at a level, so no case is ambiguous.
    Squares with a corner that is None are left out.
    """
    for row in range(len(values) - 1):
        for column in range(len(values[0]) - 1):
            spots = [(column, row), (column + 1, row), (column + 1, row + 1), (column, row + 1)]
            corners = [(x, y, value) for x, y in spots if (value := values[y][x]) is not None]
            if len(corners) < len(spots):
                continue
            middle = (column + 0.5, row + 0.5, sum(value for *_, value in corners) / 4)
            for one, other in pairwise([*corners, corners[0]]):
                cut = [
                    _between(start, end, level)
                    for start, end in ((one, other), (other, middle), (middle, one))
                    if (start[2] < level) != (end[2] < level)
                ]
                if cut:
                    yield cut[0], cut[1]


def _between(
    start: tuple[float, float, float], end: tuple[float, float, float], level: float
) -> Point:
    share = (level - start[2]) / (end[2] - start[2])
    return start[0] + (end[0] - start[0]) * share, start[1] + (end[1] - start[1]) * share


def _cross() -> Iterator[Markup]:
    x, y = _LEFT + _SIDE / 2, _TOP + _SIDE / 2
    path = f"M{x - 6} {y} H{x + 6} M{x} {y - 6} V{y + 6}"
    for color, width in (("#1c2024", 5), ("#ffffff", 2)):
        yield shape("path", d=path, stroke=color, stroke_width=width)


def _axes(found: LandscapeRecord) -> Iterator[Markup]:
    size, bottom = _SIDE / len(found.steps), _TOP + _SIDE
    for index in (0, len(found.steps) // 2, len(found.steps) - 1):
        step, at = number(found.steps[index]), (index + 0.5) * size
        yield label(_LEFT + at, bottom + 15, step)
        yield label(_LEFT - 6, bottom - at + 4, step, "end")
    yield label(_LEFT + _SIDE / 2, _HEIGHT - 6, "first direction")
    turned = Markup('<g transform="translate(16 {}) rotate(-90)">{}</g>')
    yield turned.format(_TOP + _SIDE / 2, label(0, 0, "second direction"))


def _bar() -> Iterator[Markup]:
    height = _SIDE / _BAR_PIECES
    for index in range(_BAR_PIECES):
        share, (_, y) = (index + 0.5) / _BAR_PIECES, _lower_left(0, index + 1, height)
        yield _square(_BAR, y, _BAR_WIDTH, height, share, "")


def _scale(shades: Shades) -> Iterator[Markup]:
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        y = _TOP + _SIDE * (1 - share) + 4
        yield label(_BAR + _BAR_WIDTH + 5, y, number(shades.loss(share)), "start")
    name = "loss, log scale" if shades.logarithmic else "loss"
    yield label(_BAR, _HEIGHT - 22, name, "start")
