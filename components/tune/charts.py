"""The charts of a study's report as inline SVG. Colors come from the page's style sheet."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from markupsafe import Markup

from steadytrain.components.report.charts import (
    BOTTOM,
    HEIGHT,
    LEFT,
    RIGHT,
    TOP,
    WIDTH,
    Scale,
    nice_ticks,
)
from steadytrain.components.report.curves import thin
from steadytrain.components.report.words import number

WIDE: Final = 2 * WIDTH
_ROW: Final = 26

Point = tuple[float, float]


@dataclass(frozen=True)
class Line:
    """A trial's line or dot in a chart.

    kind: "best", "finished", "stopped" or "failed", which decides about its color.
    title: shown when the pointer is on it.
    """

    kind: str
    title: str
    points: Sequence[Point]


def curves(title: str, lines: Sequence[Line], rungs: Sequence[int]) -> Markup:
    """Draw the validation curves of all trials over steps, with the rungs as vertical lines."""
    lines = [line for line in lines if line.points]
    if not lines:
        return Markup("")
    values = sorted(y for line in lines for _, y in line.points)
    # A trial that diverges would press all others into one line.
    ticks = nice_ticks(values[0], values[int(0.95 * (len(values) - 1))])
    x, y = Scale(0, rungs[-1], LEFT, WIDE - RIGHT), _upward(ticks)
    marks = [
        _vertical(x(rung)) + _text(x(rung), HEIGHT - BOTTOM + 15, f"{rung:,}") for rung in rungs
    ]
    drawn = [_polyline(line, x, y) for line in _best_last(lines)]
    label = _text((LEFT + WIDE - RIGHT) / 2, HEIGHT - 3, "step")
    about = f"{len(lines)} trials, rungs at steps {', '.join(map(str, rungs))}"
    return _svg(title, about, [_grid(ticks, y, WIDE), *marks, label, *drawn], WIDE)


def scatter(
    title: str,
    dots: Sequence[Line],
    axis: str,
    *,
    log: bool = False,
    labels: Sequence[str] = (),
    falling: Sequence[Point] = (),
    marks: Sequence[float] = (),
    width: int = WIDTH,
) -> Markup:
    """Draw a dot for each trial.

    Args:
        axis: label of the horizontal axis.
        log: the horizontal axis is logarithmic.
        labels: names of the values 0, 1, ... on the horizontal axis; empty for numbers.
        falling: a line of its own, such as the best score so far.
        marks: values on the horizontal axis with a vertical line.
        width: in pixels of the drawing; the page scales it.
    """
    points = [point for dot in dots for point in dot.points]
    if not points:
        return Markup("")
    place: Callable[[float], float] = math.log10 if log else float
    across = [place(x) for x, _ in points]
    low, high = min(across), max(across)
    pad = (high - low) * 0.04 or 0.5
    x = Scale(low - pad, high + pad, LEFT, width - RIGHT)
    ticks = nice_ticks(min(y for _, y in points), max(y for _, y in points))
    y = _upward(ticks)
    named = (
        [(float(index), text) for index, text in enumerate(labels)]
        if labels
        else [(tick, tick_label(10**tick if log else tick)) for tick in nice_ticks(low, high, 4)]
    )
    parts = [_grid(ticks, y, width)]
    parts += [
        _text(x(tick), HEIGHT - BOTTOM + 15, text)
        for tick, text in named
        if x.low <= tick <= x.high
    ]
    parts.append(_text((LEFT + width - RIGHT) / 2, HEIGHT - 3, axis))
    parts += [_vertical(x(place(mark))) for mark in marks]
    if falling:
        parts.append(_path("line c1", [(x(place(at)), y(value)) for at, value in falling]))
    parts += [
        Markup(
            '<circle class="trial {}" cx="{}" cy="{}" r="3.2"><title>{}</title></circle>'
        ).format(dot.kind, x(place(dot.points[0][0])), y(dot.points[0][1]), dot.title)
        for dot in _best_last(dots)
    ]
    return _svg(title, f"{len(dots)} points", parts, width)


def bars(title: str, shares: Mapping[str, float]) -> Markup:
    """Draw a horizontal bar for each share, the largest first."""
    if not shares:
        return Markup("")
    most = max(shares.values()) or 1.0
    left, height = 190, _ROW * len(shares) + 10
    parts = []
    for index, (name, share) in enumerate(shares.items()):
        top = 8 + index * _ROW
        width = share / most * (WIDTH - left - 60)
        parts.append(_text(left - 8, top + 13, name, "end"))
        parts.append(
            Markup('<rect class="bar" x="{}" y="{}" width="{:.1f}" height="16"/>').format(
                left, top, width
            )
        )
        parts.append(_text(left + width + 6, top + 13, f"{share:.0%}", "start"))
    about = ", ".join(f"{name} {share:.0%}" for name, share in shares.items())
    return _svg(title, about, parts, WIDTH, height)


def intervals(title: str, rows: Sequence[tuple[str, float, float, float, str]]) -> Markup:
    """Draw a dot and a confidence interval for each row, and a line at 0.

    Args:
        rows: label, low end, middle, high end, and the color's kind as in `Line`.
    """
    if not rows:
        return Markup("")
    left, height = 190, _ROW * len(rows) + TOP + BOTTOM
    ends = [end for _, low, _, high, _ in rows for end in (low, high)]
    ticks = nice_ticks(min(0.0, *ends), max(0.0, *ends), 4)
    x = Scale(ticks[0], ticks[-1], left, WIDE - RIGHT)
    parts = [
        Markup('<line class="{}" x1="{}" x2="{}" y1="{}" y2="{}"/>').format(
            "mark" if tick == 0 else "grid", x(tick), x(tick), TOP, height - BOTTOM
        )
        + _text(x(tick), height - BOTTOM + 15, tick_label(tick))
        for tick in ticks
    ]
    for index, (name, low, middle, high, kind) in enumerate(rows):
        y = TOP + (index + 0.5) * _ROW
        said = f"{name}: {number(middle)}, from {number(low)} to {number(high)}"
        parts.append(_text(left - 10, y + 4, name, "end"))
        parts.append(_path(f"trial interval {kind}", [(x(low), y), (x(high), y)], said))
        parts.append(
            Markup('<circle class="trial {}" cx="{}" cy="{}" r="4"/>').format(kind, x(middle), y)
        )
    about = "; ".join(f"{name} {number(middle)}" for name, _, middle, _, _ in rows)
    return _svg(title, about, parts, WIDE, height)


def parallel(title: str, axes: Sequence[tuple[str, str, str]], lines: Sequence[Line]) -> Markup:
    """Draw parallel coordinates.

    Args:
        axes: name, lowest and highest value of each axis.
        lines: each with one point per axis that applies: its index, and the height from 0 to 1.
    """
    if len(axes) < 2 or not lines:
        return Markup("")
    x = Scale(0, len(axes) - 1, LEFT + 20, WIDE - RIGHT - 40)
    y = Scale(0, 1, HEIGHT - BOTTOM - 8, TOP + 12)
    parts = [_polyline(line, x, y) for line in _best_last(lines)]
    for index, (name, low, high) in enumerate(axes):
        parts.append(
            Markup('<line class="mark" x1="{0}" x2="{0}" y1="{1}" y2="{2}"/>').format(
                x(index), y(0), y(1)
            )
        )
        parts += [
            _text(x(index), y(1) - 6, high),
            _text(x(index), y(0) + 14, low),
            _text(x(index), HEIGHT - 3, name),
        ]
    return _svg(title, f"{len(lines)} trials over {len(axes)} axes", parts, WIDE)


def tick_label(value: float) -> str:
    """Return a value without the digits that would only clutter an axis."""
    return f"{value:,.6g}"


def _best_last(lines: Sequence[Line]) -> list[Line]:
    """Return the lines so that the best one is drawn over the others."""
    order = ("failed", "stopped", "finished", "best")
    return sorted(lines, key=lambda line: order.index(line.kind))


def _upward(ticks: Sequence[float]) -> Scale:
    return Scale(ticks[0], ticks[-1], HEIGHT - BOTTOM, TOP)


def _polyline(line: Line, x: Scale, y: Scale) -> Markup:
    points = thin(line.points, 100)
    path = [(x(across), min(max(y(up), 0.0), float(HEIGHT))) for across, up in points]
    return _path(f"trial {line.kind}", path, line.title)


def _path(kind: str, points: Sequence[Point], title: str = "") -> Markup:
    said = Markup("<title>{}</title>").format(title) if title else ""
    return Markup('<polyline class="{}" points="{}">{}</polyline>').format(
        kind, " ".join(f"{across},{up}" for across, up in points), said
    )


def _vertical(x: float) -> Markup:
    return Markup('<line class="mark" x1="{0}" x2="{0}" y1="{1}" y2="{2}"/>').format(
        x, TOP, HEIGHT - BOTTOM
    )


def _grid(ticks: Sequence[float], y: Scale, width: int) -> Markup:
    return Markup("").join(
        Markup('<line class="grid" x1="{}" x2="{}" y1="{}" y2="{}"/>').format(
            LEFT, width - RIGHT, y(tick), y(tick)
        )
        + _text(LEFT - 6, y(tick) + 4, tick_label(tick), "end")
        for tick in ticks
    )


def _text(x: float, y: float, text: str, anchor: str = "middle") -> Markup:
    return Markup('<text x="{:.1f}" y="{:.1f}" text-anchor="{}">{}</text>').format(
        x, y, anchor, text
    )


def _svg(
    title: str, description: str, parts: Sequence[Markup], width: int, height: int = HEIGHT
) -> Markup:
    return Markup(
        '<svg class="chart" viewBox="0 0 {} {}" role="img" aria-label="{}. {}">{}</svg>'
    ).format(width, height, title, description, Markup("").join(parts))
