"""Draw the attempts at training on one time axis, as inline SVG.

Each attempt has a row. The colors show the kinds of time.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Callable, Sequence
from itertools import accumulate

from markupsafe import Markup

from steadytrain.components.pages.charts import label, shape, svg
from steadytrain.components.shared.quantities import duration, moment
from steadytrain.components.train.recovery.history import AttemptHistory
from steadytrain.components.train.recovery.times import Span, Times

WIDTH, LEFT, RIGHT, TOP, BOTTOM = 960, 150, 16, 6, 26
TALLEST, ROW, LABEL = 480, 24, 13
NARROWEST = 0.4
"""Pixels. Narrower checkpoints are not drawn; other narrower bars get this width."""
LONGEST_WAIT = 0.25
"""Waits longer than this share of all other time are drawn shorter, and the tooltip says so."""
_TICKS = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 43200, 86400)


def timeline(attempts: Sequence[AttemptHistory], spans: Sequence[Span]) -> Markup:
    """Draw a row for each attempt, or return "" if there is nothing to draw.

    A wait is in the row of the attempt that follows it.
    """
    if not spans:
        return Markup("")
    place, shortened = _places(spans)
    pitch = min(ROW, TALLEST / len(attempts))
    rows = {item.started.attempt: index for index, item in enumerate(attempts)}
    base = TOP + pitch * len(attempts)
    parts = [_axis(spans, place, shortened, base)]
    every = math.ceil(LABEL / pitch)
    parts += [
        _label(item, TOP + pitch * (index + 0.5) + 4)
        for index, item in enumerate(attempts)
        if index % every == 0
    ]
    for span in _drawable(spans, place):
        top = TOP + pitch * rows[span.attempt]
        parts.append(_bar(span, place, top, pitch, shortened=span.start in shortened))
    description = f"{len(attempts)} attempts in {duration(Times.of(spans).wall)}"
    return svg("Timeline", description, parts, WIDTH, base + BOTTOM, "timeline")


def _places(spans: Sequence[Span]) -> tuple[Callable[[float], float], set[float]]:
    """Return a function from times to pixels, and the starts of the waits drawn shorter."""
    rest = sum(span.seconds for span in spans if span.kind != "waiting")
    longest = LONGEST_WAIT * rest if rest else math.inf
    shortened = {span.start for span in spans if span.kind == "waiting" and span.seconds > longest}
    drawn = [longest if span.start in shortened else span.seconds for span in spans]
    unit = (WIDTH - LEFT - RIGHT) / sum(drawn)
    edges = [LEFT + unit * seconds for seconds in accumulate(drawn, initial=0.0)]
    starts = [span.start for span in spans]

    def place(time: float) -> float:
        index = max(0, bisect(starts, time) - 1)
        share = (time - spans[index].start) / (spans[index].end - spans[index].start)
        return edges[index] + share * (edges[index + 1] - edges[index])

    return place, shortened


def _drawable(spans: Sequence[Span], place: Callable[[float], float]) -> list[Span]:
    """Merge spans, so that a long run still has a small page.

    Adjacent spans of one kind become one span. A checkpoint too narrow to see joins the span before
    it.
    """
    kept: list[Span] = []
    for span in spans:
        width = place(span.end) - place(span.start)
        before = kept[-1] if kept else None
        narrow = span.kind == "checkpointing" and width < NARROWEST
        if before and before.attempt == span.attempt and (narrow or before.kind == span.kind):
            skipped = before.skipped + span.skipped
            kept[-1] = Span(before.kind, before.attempt, before.start, span.end, skipped)
        else:
            kept.append(span)
    return kept


def _bar(
    span: Span, place: Callable[[float], float], top: float, pitch: float, *, shortened: bool
) -> Markup:
    left, right = place(span.start), place(span.end)
    height = pitch * (0.2 if span.kind == "waiting" else 0.66)
    owner = "before attempt" if span.kind == "waiting" else "attempt"
    title = f"{owner} {span.attempt}: {span.kind} {duration(span.seconds)}"
    title += f", from {moment(span.start)}" + (" (drawn shorter)" if shortened else "")
    return shape(
        "rect",
        title,
        class_=f"{span.kind} shortened" if shortened else span.kind,
        x=left,
        y=top + (pitch - height) / 2,
        width=max(NARROWEST, right - left),
        height=height,
    )


def _label(attempt: AttemptHistory, y: float) -> Markup:
    ended = attempt.ended
    how = (ended.failure_class or ended.outcome.replace("_", " ")) if ended else "no end"
    number = attempt.started.attempt
    said = how if len(how) <= 18 else f"{how[:17]}…"
    return label(0, y, str(number), "start") + label(28, y, said, "start")


def _axis(
    spans: Sequence[Span], place: Callable[[float], float], shortened: set[float], base: float
) -> Markup:
    """Draw ticks for the time since the start, except within waits that are drawn shorter."""
    start = spans[0].start
    shown = [span for span in spans if span.start not in shortened]
    whole = sum(span.seconds for span in shown)
    days = math.ceil(whole / 8 / 86400) * 86400
    step = next((tick for tick in _TICKS if whole / tick <= 8), days)
    parts, last = [], -math.inf
    for span in shown:
        first = math.ceil((span.start - start) / step)
        for index in range(first, math.floor((span.end - start) / step) + 1):
            x = place(start + index * step)
            if x - last < 60:
                continue
            last = x
            parts += [
                shape("line", class_="grid", x1=x, x2=x, y1=TOP, y2=base),
                label(x, base + 16, _elapsed(index * step)),
            ]
    return Markup("").join(parts)


def _elapsed(seconds: int) -> str:
    """Format a tick's label: 0, 45 s, 12 min, 3 h, 2 d 6 h."""
    parts = [(seconds // 86400, "d"), (seconds // 3600 % 24, "h"), (seconds // 60 % 60, "min")]
    parts.append((seconds % 60, "s"))
    return " ".join(f"{count} {unit}" for count, unit in parts if count) or "0"
