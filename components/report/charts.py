"""Line charts and histograms as inline SVG.

This is our own code, and short. matplotlib takes a second to import and writes glyphs as paths,
which don't work for screen readers or dark pages. JavaScript libraries add megabytes. Colors and
fonts come from the page's style sheet, and `Markup.format` escapes every text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from steadytrain.components.report.curves import Curve, thin
from steadytrain.components.report.words import number

WIDTH, HEIGHT = 440, 220
LEFT, RIGHT, TOP, BOTTOM = 62, 24, 14, 34

Format = Callable[[float], str]


@dataclass(frozen=True)
class Scale:
    """Maps values on one axis to pixels."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return round(self.start + share * (self.end - self.start), 1)


def line_chart(
    title: str,
    curves: Sequence[Curve],
    *,
    show: Format = number,
    marks: Sequence[tuple[float, str]] = (),
    from_zero: bool = False,
) -> Markup:
    """Draw curves over steps: the first as a line, the others as lines with dots.

    Args:
        show: formats values in tick labels, in tooltips and in the description.
        marks: steps with their labels, drawn as vertical lines.
        from_zero: the vertical axis includes 0.

    Returns:
        The SVG, or "" if no curve has a point.
    """
    points = [point for curve in curves for point in curve.points]
    if not points:
        return Markup("")
    steps = [x for x, _ in points] + [x for curve in curves for x in curve.broken]
    values = [y for _, y in points]
    ticks = nice_ticks(min(0.0, *values) if from_zero else min(values), max(values))
    x = Scale(min(steps), max(max(steps), min(steps) + 1), LEFT, WIDTH - RIGHT)
    y = Scale(ticks[0], ticks[-1], HEIGHT - BOTTOM, TOP)
    # Digits that `number` always shows would only clutter the axis.
    parts = [_grid(ticks, y, _tick if show is number else show), _step_axis(x)]
    parts += [_mark(x(step), label) for step, label in marks]
    for index, curve in enumerate(curves):
        parts.append(_line(curve, index, x, y, show))
    return _svg(title, _describe(curves, show), parts)


def share_chart(
    title: str,
    points: Sequence[tuple[float, float]],
    *,
    axis: str,
    description: str,
    ideal: bool = False,
) -> Markup:
    """Draw a line in a square from 0 to 1, or return "" if there are no points.

    Args:
        points: ordered by x, ascending or descending.
        axis: label of the horizontal axis.
        description: the chart in words.
        ideal: add a second line from corner to corner.
    """
    if not points:
        return Markup("")
    ticks = nice_ticks(0.0, 1.0)
    x, y = Scale(0, 1, LEFT, WIDTH - RIGHT), Scale(0, 1, HEIGHT - BOTTOM, TOP)
    parts = [_grid(ticks, y, _tick)]
    parts += [_text(x(tick), HEIGHT - BOTTOM + 15, _tick(tick), "middle") for tick in ticks]
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 3, axis, "middle"))
    for index, line in enumerate([points, *([[(0.0, 0.0), (1.0, 1.0)]] if ideal else [])]):
        path = " ".join(f"{x(across)},{y(up)}" for across, up in line)
        parts.append(Markup('<polyline class="line c{}" points="{}"/>').format(index, path))
    return _svg(title, description, parts)


def histogram(title: str, bins: Sequence[tuple[str, str, int]], *, unit: str) -> Markup:
    """Draw bars of counts, or return "" if all counts are 0.

    Args:
        bins: each bin's label on the axis, its full name, and its count.
    """
    most = max(bins, key=lambda item: item[2], default=None)
    if most is None or most[2] <= 0:
        return Markup("")
    ticks = nice_ticks(0, most[2])
    y = Scale(0, ticks[-1], HEIGHT - BOTTOM, TOP)
    pitch = (WIDTH - LEFT - RIGHT) / len(bins)
    every = math.ceil(len(bins) / 9)
    parts = [_grid(ticks, y, _tick)]
    for index, (label, full, count) in enumerate(bins):
        left = LEFT + index * pitch
        parts.append(_bar(left + pitch * 0.08, pitch * 0.84, y(0), y(count), f"{full}: {count:,}"))
        if index % every == 0:
            parts.append(_text(left + pitch / 2, HEIGHT - BOTTOM + 15, label, "middle"))
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 3, unit, "middle"))
    return _svg(title, f"Most, {most[2]:,}, are in {most[1]}", parts)


_LARGEST = 1e300


def nice_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Return round values, 1, 2 or 5 times a power of ten apart, that enclose low and high."""
    # Beyond, the difference of two numbers may be too large for a float.
    low, high = max(low, -_LARGEST), min(high, _LARGEST)
    if high - low <= 1e-12 * max(abs(low), abs(high), 1e-300):
        spread = abs(low) * 0.1 or 1.0
        low, high = low - spread, high + spread
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [index * step for index in range(first, last + 1)]


def _svg(title: str, description: str, parts: Sequence[Markup]) -> Markup:
    return Markup(
        '<svg class="chart" viewBox="0 0 {} {}" role="img" aria-label="{}. {}">{}</svg>'
    ).format(WIDTH, HEIGHT, title, description, Markup("").join(parts))


def _text(x: float, y: float, text: str, anchor: str) -> Markup:
    return Markup('<text x="{:.1f}" y="{:.1f}" text-anchor="{}">{}</text>').format(
        x, y, anchor, text
    )


def _bar(left: float, width: float, bottom: float, top: float, title: str) -> Markup:
    return Markup(
        '<rect class="bar" x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}">'
        "<title>{}</title></rect>"
    ).format(left, top, width, bottom - top, title)


def _grid(ticks: Sequence[float], y: Scale, show: Format) -> Markup:
    lines = [
        Markup('<line class="grid" x1="{}" x2="{}" y1="{}" y2="{}"/>').format(
            LEFT, WIDTH - RIGHT, y(tick), y(tick)
        )
        + _text(LEFT - 6, y(tick) + 4, show(tick), "end")
        for tick in ticks
    ]
    return Markup("").join(lines)


def _tick(value: float) -> str:
    return f"{value:,.6g}"


def _step_axis(x: Scale) -> Markup:
    ticks = [tick for tick in nice_ticks(x.low, x.high) if x.low <= tick <= x.high]
    labels = [
        _text(x(tick), HEIGHT - BOTTOM + 15, _tick(tick), "middle")
        for tick in ticks
        if tick == int(tick)
    ]
    middle = (LEFT + WIDTH - RIGHT) / 2
    return Markup("").join([*labels, _text(middle, HEIGHT - 3, "step", "middle")])


def _mark(x: float, label: str) -> Markup:
    return Markup(
        '<line class="mark" x1="{0}" x2="{0}" y1="{1}" y2="{2}"><title>{3}</title></line>'
    ).format(x, TOP, HEIGHT - BOTTOM, label)


def _line(curve: Curve, index: int, x: Scale, y: Scale, show: Format) -> Markup:
    drawn = thin(curve.points)
    path = " ".join(f"{x(step)},{y(value)}" for step, value in drawn)
    parts = [Markup('<polyline class="line c{}" points="{}"/>').format(index, path)]
    if index > 0 or len(drawn) == 1:
        parts += [
            Markup(
                '<circle class="dot c{}" cx="{}" cy="{}" r="3"><title>{}</title></circle>'
            ).format(
                index, x(step), y(value), f"{curve.name} at step {number(step)}: {show(value)}"
            )
            for step, value in thin(drawn, 60)
        ]
    parts += [
        Markup('<path class="broken" d="M{0} {1} l4 -7 h-8 z"><title>{2}</title></path>').format(
            x(step), TOP + 7, f"{curve.name} is not finite at step {number(step)}"
        )
        for step in curve.broken[:50]
    ]
    return Markup("").join(parts)


def _describe(curves: Sequence[Curve], show: Format) -> str:
    """Describe the chart in words, for people who cannot see it."""
    said = []
    for curve in curves:
        if not curve.points:
            continue
        first, last = curve.points[0], curve.points[-1]
        said.append(
            f"{curve.name}: {show(first[1])} at step {number(first[0])}, "
            f"{show(last[1])} at step {number(last[0])}"
        )
    return "; ".join(said)
