"""Draw the loss around the trained weights: a map with contour lines, as inline SVG."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from steadytrain.components.shared.records import LandscapeRecord

_COLORS: Final = (
    *("#00224e", "#123570", "#3b496c", "#575d6d", "#707173"),
    *("#8a8678", "#a59c74", "#c3b369", "#e1cc55", "#fee838"),
)
"""Cividis: with and without color blindness, lighter means more (Nunez et al. 2018)."""
_WIDTH, _HEIGHT, _LEFT, _TOP, _SIDE = 440, 300, 62, 12, 244
_BAR, _BAR_WIDTH = 334, 14
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


def landscape_chart(found: LandscapeRecord) -> str:
    """Return the map as SVG, or "" if no loss is finite.

    Each square is a point of the grid, and its tooltip has the numbers. The cross in the middle is
    the trained model. Its page styles `.chart text` and `.contour`.
    """
    finite = [value for line in found.losses for value in line if value is not None]
    if not finite:
        return ""
    shades = Shades.of(finite)
    # Crisp edges, so that no background shines through between two squares.
    squares = "".join([*_squares(found, shades), *_bar()])
    parts = [f'<g shape-rendering="crispEdges">{squares}</g>', *_contours(found, shades)]
    parts += [_middle(), *_axes(found), *_scale(shades)]
    return (
        f'<svg class="chart landscape" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
        f'aria-label="Loss landscape. {landscape_words(found)}">{"".join(parts)}</svg>'
    )


def landscape_words(found: LandscapeRecord) -> str:
    """Return the map in words: the loss in the middle, at the edge, and where it is lowest."""
    middle, edge = found.profile[0], found.profile[-1]
    said = [f"Loss {_number(middle.mean)} at the trained weights"]
    if edge.lowest is not None:
        said.append(
            f"{_number(edge.lowest)} to {_number(edge.highest)} at a distance of "
            f"{_number(edge.distance)}"
        )
    lowest = min(
        (ring for ring in found.profile if ring.lowest is not None),
        key=lambda ring: ring.lowest or 0.0,
        default=None,
    )
    if lowest is not None:
        said.append(f"lowest at a distance of {_number(lowest.distance)}")
    if broken := sum(ring.not_finite for ring in found.profile):
        said.append(f"not finite at {broken} of {len(found.steps) ** 2} points")
    return ", ".join(said)


def landscape_rows(found: LandscapeRecord) -> list[list[str]]:
    """Return the profile as text: distance, lowest, mean and highest loss, points not finite."""
    return [
        [
            _number(ring.distance),
            *map(_number, (ring.lowest, ring.mean, ring.highest)),
            str(ring.not_finite or ""),
        ]
        for ring in found.profile
    ]


LANDSCAPE_COLUMNS: Final = ("distance", "lowest loss", "mean loss", "highest loss", "not finite")


def _squares(found: LandscapeRecord, shades: Shades) -> Iterator[str]:
    size = _SIDE / len(found.steps)
    for row, (second, line) in enumerate(zip(found.steps, found.losses, strict=True)):
        for column, (first, loss) in enumerate(zip(found.steps, line, strict=True)):
            x, y = _LEFT + column * size, _TOP + _SIDE - (row + 1) * size
            place = f"{_number(first)}, {_number(second)}"
            if loss is None:
                yield (
                    f'<path class="broken-point" d="M{x:.1f} {y:.1f} l{size:.1f} {size:.1f} '
                    f'm0 {-size:.1f} l{-size:.1f} {size:.1f}" fill="none" stroke="currentColor">'
                    f"<title>{place}: not finite</title></path>"
                )
            else:
                yield (
                    f'<rect x="{x:.1f}" y="{y:.1f}" width="{size + 0.3:.1f}" '
                    f'height="{size + 0.3:.1f}" fill="{_color(shades(loss))}">'
                    f"<title>{place}: {_number(loss)}</title></rect>"
                )


def _color(share: float) -> str:
    place = min(max(share, 0.0), 1.0) * (len(_COLORS) - 1)
    index = min(int(place), len(_COLORS) - 2)
    pairs = zip(_channels(_COLORS[index]), _channels(_COLORS[index + 1]), strict=True)
    mixed = [round(low + (high - low) * (place - index)) for low, high in pairs]
    return "#" + "".join(f"{value:02x}" for value in mixed)


def _channels(color: str) -> list[int]:
    return [int(color[start : start + 2], 16) for start in (1, 3, 5)]


def _contours(found: LandscapeRecord, shades: Shades) -> Iterator[str]:
    """Yield one path for each level: dark lines on light squares, light lines on dark ones."""
    shares = [[None if loss is None else shades(loss) for loss in line] for line in found.losses]
    size = _SIDE / len(found.steps)
    for number in range(1, _CONTOURS):
        level = number / _CONTOURS
        pieces = "".join(
            f"M{_LEFT + (x1 + 0.5) * size:.1f} {_TOP + _SIDE - (y1 + 0.5) * size:.1f} "
            f"L{_LEFT + (x2 + 0.5) * size:.1f} {_TOP + _SIDE - (y2 + 0.5) * size:.1f} "
            for (x1, y1), (x2, y2) in crossings(shares, level)
        )
        if pieces:
            color = "#ffffff" if level < 0.55 else "#1c2024"
            yield (
                f'<path class="contour" d="{pieces.strip()}" fill="none" stroke="{color}" '
                f'stroke-opacity="0.7"><title>contour at {_number(shades.loss(level))}</title>'
                "</path>"
            )


Spot = tuple[float, float]


def crossings(
    values: Sequence[Sequence[float | None]], level: float
) -> Iterator[tuple[Spot, Spot]]:
    """Yield the pieces of a contour line, (column, row) to (column, row), by marching triangles.

    Each square between four points is cut into four triangles around its middle, whose value is the
    mean. A plane through three corners has one straight line at a level, so no case is ambiguous.
    Squares with a corner that is None are left out.
    """
    for row in range(len(values) - 1):
        for column in range(len(values[0]) - 1):
            spots = [(0, 0), (1, 0), (1, 1), (0, 1)]
            found = [values[row + y][column + x] for x, y in spots]
            known = [value for value in found if value is not None]
            if len(known) < len(found):
                continue
            middle = ((column + 0.5, row + 0.5), sum(known) / 4)
            corners = [
                ((float(column + x), float(row + y)), value)
                for (x, y), value in zip(spots, known, strict=True)
            ]
            for one, other in pairwise([*corners, corners[0]]):
                edges = ((one, other), (other, middle), (middle, one))
                cut = [
                    _between(start, end, level)
                    for start, end in edges
                    if (start[1] < level) != (end[1] < level)
                ]
                if cut:
                    yield cut[0], cut[1]


def _between(start: tuple[Spot, float], end: tuple[Spot, float], level: float) -> Spot:
    (x, y), low = start
    (other_x, other_y), high = end
    share = (level - low) / (high - low)
    return x + (other_x - x) * share, y + (other_y - y) * share


def _middle() -> str:
    x, y = _LEFT + _SIDE / 2, _TOP + _SIDE / 2
    cross = f"M{x - 6} {y} H{x + 6} M{x} {y - 6} V{y + 6}"
    return (
        f'<path d="{cross}" stroke="#1c2024" stroke-width="5"/>'
        f'<path d="{cross}" stroke="#ffffff" stroke-width="2"/>'
    )


def _axes(found: LandscapeRecord) -> Iterator[str]:
    size, bottom = _SIDE / len(found.steps), _TOP + _SIDE
    for index in (0, len(found.steps) // 2, len(found.steps) - 1):
        step = _number(found.steps[index])
        at = (index + 0.5) * size
        yield _text(_LEFT + at, bottom + 15, step, "middle")
        yield _text(_LEFT - 6, bottom - at + 4, step, "end")
    yield _text(_LEFT + _SIDE / 2, _HEIGHT - 6, "first direction", "middle")
    x, y = 16, _TOP + _SIDE / 2
    yield (
        f'<text x="{x}" y="{y}" text-anchor="middle" transform="rotate(-90 {x} {y})">'
        "second direction</text>"
    )


def _bar() -> Iterator[str]:
    count = 48
    height = _SIDE / count
    for index in range(count):
        y = _TOP + _SIDE - (index + 1) * height
        yield (
            f'<rect x="{_BAR}" y="{y:.1f}" width="{_BAR_WIDTH}" height="{height + 0.3:.1f}" '
            f'fill="{_color((index + 0.5) / count)}"/>'
        )


def _scale(shades: Shades) -> Iterator[str]:
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        y = _TOP + _SIDE * (1 - share) + 4
        yield _text(_BAR + _BAR_WIDTH + 5, y, _number(shades.loss(share)), "start")
    name = "loss, log scale" if shades.logarithmic else "loss"
    yield _text(_BAR, _HEIGHT - 22, name, "start")


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{text}</text>'


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"
