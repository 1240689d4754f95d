"""Charts as inline SVG; curves and tables as text."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from markupsafe import Markup

from steadytrain.components.shared.quantities import number

WIDTH, HEIGHT, WIDE = 440, 220, 880
LEFT, RIGHT, TOP, BOTTOM = 62, 24, 14, 34
LABELS, ROW = 190, 26
"""Width of the labels of a chart with a row for each thing, and a row's height."""
DRAWN_POINTS = 400
"""Maximum number of points in a line. A chart is about 400 pixels wide."""
TABLE_ROWS = 24
_LARGEST = 1e300
_BARS: Final = "▁▂▃▄▅▆▇█"

Point = tuple[float, float]
Format = Callable[[float], str]


@dataclass(frozen=True)
class Curve:
    """One measure by step.

    points: (step, value), finite values only, in step order.
    broken: steps with a value that is not finite.
    """

    name: str
    points: Sequence[Point]
    broken: Sequence[float] = ()


@dataclass(frozen=True)
class Figure:
    """A chart with its title, the names of its curves, and its last values in words.

    curves: what is drawn over steps.
    """

    title: str
    svg: Markup
    legend: Sequence[str]
    caption: str
    curves: Sequence[Curve] = ()

    @property
    def rows(self) -> list[tuple[str, list[str]]]:
        """The curves as rows of a step and each curve's value there, a few of all steps."""
        values = [dict(curve.points) for curve in self.curves]
        steps = sorted({step for points in values for step in points})
        kept = thin([(step, float(index)) for index, step in enumerate(steps)], TABLE_ROWS)
        return [(number(step), [number(one.get(step)) for one in values]) for step, _ in kept]


@dataclass(frozen=True)
class Series:
    """What a chart draws in one color.

    kind: CSS classes, which decide about the color.
    points: of a line.
    title: shown when the pointer is on the line.
    dots: each with what is shown when the pointer is on it.
    """

    kind: str
    points: Sequence[Point] = ()
    title: str = ""
    dots: Sequence[tuple[Point, str]] = ()


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


def shape(element: str, title: str = "", **attributes: str | float) -> Markup:
    """Return an SVG element; "class_" is its class, and "stroke_width" its stroke-width.

    Args:
        title: shown when the pointer is on it.
    """
    given = Markup("").join(
        Markup(' {}="{}"').format(
            name.rstrip("_").replace("_", "-"),
            f"{value:.1f}".removesuffix(".0") if isinstance(value, float) else value,
        )
        for name, value in attributes.items()
    )
    if not title:
        return Markup("<{}{}/>").format(element, given)
    return Markup("<{0}{1}><title>{2}</title></{0}>").format(element, given, title)


def label(x: float, y: float, text: str, anchor: str = "middle") -> Markup:
    """Return a text; `anchor` is the part of it that is at x."""
    return Markup('<text x="{:.1f}" y="{:.1f}" text-anchor="{}">{}</text>').format(
        x, y, anchor, text
    )


def line(points: Iterable[Point], kind: str, title: str = "") -> Markup:
    """Return a line through pixels."""
    drawn = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return shape("polyline", title, class_=kind, points=drawn)


def svg(
    title: str, about: str, parts: Iterable[Markup], width: float, height: float, kind: str = ""
) -> Markup:
    """Return a drawing; `about` describes it to people who cannot see it."""
    return Markup(
        '<svg class="chart{}" viewBox="0 0 {} {:.0f}" role="img" aria-label="{}. {}">{}</svg>'
    ).format(kind and f" {kind}", width, height, title, about, Markup("").join(parts))


def plot(
    title: str,
    about: str,
    series: Iterable[Series],
    *,
    axis: str,
    x: Point,
    labels: Iterable[tuple[float, str]],
    ticks: Sequence[float],
    show: Format | None = None,
    marks: Iterable[tuple[float, str]] = (),
    broken: Iterable[tuple[float, str]] = (),
    width: int = WIDTH,
) -> Markup:
    """Draw lines and dots. A line that leaves the drawing is at its edge.

    Args:
        axis, x, labels: name, ends and labels of the horizontal axis.
        ticks: labels of the vertical axis; the first and the last are its ends.
        show: formats the ticks.
        marks: vertical lines, each with its tooltip.
        broken: where values are not finite, each with its tooltip.
    """
    across = Scale(*x, LEFT, width - RIGHT)
    up = Scale(ticks[0], ticks[-1], HEIGHT - BOTTOM, TOP)
    parts = [label((LEFT + width - RIGHT) / 2, HEIGHT - 3, axis)]
    for tick in ticks:
        y = up(tick)
        parts += [
            shape("line", class_="grid", x1=LEFT, x2=width - RIGHT, y1=y, y2=y),
            label(LEFT - 6, y + 4, (show or tick_label)(tick), "end"),
        ]
    parts += [label(across(at), HEIGHT - BOTTOM + 15, text) for at, text in labels]
    for at, text in marks:
        ends = {"x1": across(at), "x2": across(at), "y1": TOP, "y2": HEIGHT - BOTTOM}
        parts.append(shape("line", text, class_="mark", **ends))
    for one in series:
        if one.points:
            placed = [(across(at), min(max(up(y), 0.0), float(HEIGHT))) for at, y in one.points]
            parts.append(line(placed, one.kind, one.title))
        for (at, y), text in one.dots:
            parts.append(shape("circle", text, class_=one.kind, cx=across(at), cy=up(y), r=3))
    for at, text in broken:
        path = f"M{across(at)} {TOP + 7} l4 -7 h-8 z"
        parts.append(shape("path", text, class_="broken", d=path))
    return svg(title, about, parts, width, HEIGHT)


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
    values = [y for curve in curves for _, y in curve.points]
    if not values:
        return Markup("")
    steps = [x for curve in curves for x in (*(x for x, _ in curve.points), *curve.broken)]
    low, high = min(steps), max(max(steps), min(steps) + 1)
    series, broken, about = [], [], []
    for index, curve in enumerate(curves):
        labels = [(p, f"{show(p[1])} at step {number(p[0])}") for p in thin(curve.points)]
        dots = thin(curve.points, 60) if index > 0 or len(labels) == 1 else []
        series.append(
            Series(
                f"line c{index}",
                [point for point, _ in labels],
                dots=[(p, f"{curve.name}: {show(p[1])} at step {number(p[0])}") for p in dots],
            )
        )
        broken += [
            (at, f"{curve.name} is not finite at step {number(at)}") for at in curve.broken[:50]
        ]
        about += [f"{curve.name}: {labels[0][1]}, {labels[-1][1]}"] if labels else []
    inside = [tick for tick in nice_ticks(low, high) if low <= tick <= high and tick == int(tick)]
    return plot(
        title,
        "; ".join(about),
        series,
        axis="step",
        x=(low, high),
        labels=[(tick, tick_label(tick)) for tick in inside],
        ticks=nice_ticks(min(0.0, *values) if from_zero else min(values), max(values)),
        # Digits that `number` always shows would only clutter the axis.
        show=None if show is number else show,
        marks=marks,
        broken=broken,
    )


def share_chart(title: str, about: str, lines: Sequence[Sequence[Point]], axis: str) -> Markup:
    """Draw lines in a square from 0 to 1."""
    ticks = nice_ticks(0.0, 1.0)
    labels = [(tick, tick_label(tick)) for tick in ticks]
    series = [Series(f"line c{index}", points) for index, points in enumerate(lines)]
    return plot(title, about, series, axis=axis, x=(0, 1), labels=labels, ticks=ticks)


def scatter(
    title: str,
    dots: Sequence[Series],
    axis: str,
    *,
    log: bool = False,
    names: Sequence[str] = (),
    through: Sequence[Point] = (),
    marks: Sequence[float] = (),
    width: int = WIDTH,
) -> Markup:
    """Draw dots, or return "" if there are none.

    Args:
        axis: name of the horizontal axis.
        log: the horizontal axis is logarithmic.
        names: of the values 0, 1, ... on the horizontal axis; empty for numbers.
        through: a line of its own, such as the best score so far.
        marks: values on the horizontal axis with a vertical line.
        width: in pixels of the drawing; the page scales it.
    """
    scale: Callable[[float], float] = math.log10 if log else float
    placed = [
        Series(one.kind, dots=[((scale(x), y), text) for (x, y), text in one.dots]) for one in dots
    ]
    points = [point for one in placed for point, _ in one.dots]
    if not points:
        return Markup("")
    across, up = [x for x, _ in points], [y for _, y in points]
    low, high = min(across), max(across)
    pad = (high - low) * 0.04 or 0.5
    labels = [(float(index), name) for index, name in enumerate(names)] or [
        (tick, tick_label(float(f"{10**tick:.2g}") if log else tick))
        for tick in nice_ticks(low, high, 4)
    ]
    return plot(
        title,
        f"{len(points)} points",
        [Series("line c1", [(scale(x), y) for x, y in through]), *placed],
        axis=axis,
        x=(low - pad, high + pad),
        labels=[(at, text) for at, text in labels if low - pad <= at <= high + pad],
        ticks=nice_ticks(min(up), max(up)),
        marks=[(scale(mark), "") for mark in marks],
        width=width,
    )


def intervals(title: str, rows: Sequence[tuple[str, float, float, float, str]]) -> Markup:
    """Draw a dot and a confidence interval for each row, and a line at 0.

    Args:
        rows: name, low end, middle, high end, and the kind of trial in whose color it is.
    """
    if not rows:
        return Markup("")
    bottom = TOP + ROW * len(rows)
    ends = [end for _, low, _, high, _ in rows for end in (low, high)]
    ticks = nice_ticks(min(0.0, *ends), max(0.0, *ends), 4)
    x, parts = Scale(ticks[0], ticks[-1], LABELS, WIDE - RIGHT), []
    for tick in ticks:
        kind = "mark" if tick == 0 else "grid"
        parts += [
            shape("line", class_=kind, x1=x(tick), x2=x(tick), y1=TOP, y2=bottom),
            label(x(tick), bottom + 15, tick_label(tick)),
        ]
    for index, (name, low, middle, high, kind) in enumerate(rows):
        y = TOP + (index + 0.5) * ROW
        said = f"{name}: {number(middle)}, from {number(low)} to {number(high)}"
        parts += [
            label(LABELS - 10, y + 4, name, "end"),
            line([(x(low), y), (x(high), y)], f"trial interval {kind}", said),
            shape("circle", class_=f"trial {kind}", cx=x(middle), cy=y, r=4),
        ]
    about = "; ".join(f"{name} {number(middle)}" for name, _, middle, _, _ in rows)
    return svg(title, about, parts, WIDE, bottom + BOTTOM)


def parallel(title: str, axes: Sequence[tuple[str, str, str]], lines: Sequence[Series]) -> Markup:
    """Draw parallel coordinates.

    Args:
        axes: name, lowest and highest value of each axis.
        lines: each with one point per axis that applies: its index, and the height from 0 to 1.
    """
    if len(axes) < 2 or not lines:
        return Markup("")
    x = Scale(0, len(axes) - 1, LEFT + 20, WIDE - RIGHT - 40)
    y = Scale(0, 1, HEIGHT - BOTTOM - 8, TOP + 12)
    parts = [line([(x(at), y(up)) for at, up in one.points], one.kind, one.title) for one in lines]
    for index, (name, low, high) in enumerate(axes):
        at = x(index)
        parts.append(shape("line", class_="mark", x1=at, x2=at, y1=y(0), y2=y(1)))
        parts += [label(at, y(1) - 6, high), label(at, y(0) + 14, low), label(at, HEIGHT - 3, name)]
    return svg(title, f"{len(lines)} trials over {len(axes)} axes", parts, WIDE, HEIGHT)


def spark_picture(values: Sequence[float]) -> Markup:
    """Draw finite values without axes, or return "" if there are fewer than two."""
    if len(values) < 2:
        return Markup("")
    across = 96 / (len(values) - 1)
    drawn = [(index * across, 20 - share * 18) for index, share in enumerate(_shares(values))]
    return Markup(
        '<svg class="spark" viewBox="0 0 96 22" role="img" aria-label="loss from {} to {}">{}</svg>'
    ).format(number(values[0]), number(values[-1]), line(drawn, "line c0"))


def spark_bars(counts: Sequence[int], low: float | None, high: float | None) -> Markup:
    """Draw how many numbers are in equal parts from low to high, or return "" without counts."""
    if not counts or low is None or high is None:
        return Markup("")
    width, most = 96 / len(counts), max(counts)
    bars = Markup("").join(
        shape("rect", x=index * width, y=22 - tall, width=width - 1, height=tall)
        for index, count in enumerate(counts)
        # What occurs at all is to be seen.
        if (tall := count and max(1.0, 20 * count / most))
    )
    parts = ", ".join(f"{count:,}" for count in counts)
    return Markup(
        '<svg class="spark" viewBox="0 0 96 22" role="img" aria-label="numbers in equal parts from '
        '{0} to {1}: {2}"><title>{0} to {1}</title>{3}</svg>'
    ).format(number(low), number(high), parts, bars)


def spark_line(values: Sequence[float], width: int = 24) -> str:
    """Draw values with at most `width` bars of text; values that are not finite are left out."""
    finite = [(float(index), value) for index, value in enumerate(values) if math.isfinite(value)]
    return text_bars(_shares([value for _, value in thin(finite, width)][-width:]))


def text_bars(shares: Iterable[float]) -> str:
    """Draw a bar of text for each share of 1."""
    return "".join(_BARS[round(share * (len(_BARS) - 1))] for share in shares)


def _shares(values: Sequence[float]) -> list[float]:
    """Return where each value is between the lowest, 0, and the highest, 1."""
    # Halves, because the difference of two large floats may be infinite.
    low, high = min(values, default=0.0) / 2, max(values, default=0.0) / 2
    return [(value / 2 - low) / ((high - low) or 1.0) for value in values]


def tick_label(value: float) -> str:
    """Return a value without the digits that would only clutter an axis."""
    return f"{value:,.6g}"


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


def thin(points: Sequence[Point], limit: int = DRAWN_POINTS) -> Sequence[Point]:
    """Return about `limit` points that look the same: the lowest and the highest in each part.

    Unlike an average or every n-th point, this keeps spikes.
    """
    if len(points) <= limit:
        return points
    parts = limit // 2
    bounds = [index * len(points) // parts for index in range(parts + 1)]
    kept = {0, len(points) - 1}
    for start, end in pairwise(bounds):
        part = range(start, end)
        kept |= {min(part, key=lambda i: points[i][1]), max(part, key=lambda i: points[i][1])}
    return [points[index] for index in sorted(kept)]


def aligned(rows: Sequence[Sequence[str]], indent: str = "") -> Iterator[str]:
    """Yield the rows of a table as lines."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for cells in rows:
        columns = (cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
        yield (indent + "  ".join(columns)).rstrip()
