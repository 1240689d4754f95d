"""Figures of training: of one run, and of several runs in comparison."""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import Final, TypeVar

from markupsafe import Markup

from steadytrain.components.pages.charts import (
    Curve,
    Figure,
    Format,
    Point,
    label,
    line_chart,
    shape,
    svg,
    text_bars,
)
from steadytrain.components.report.facts import Facts
from steadytrain.components.report.story import attempts
from steadytrain.components.shared.events.points import Histogram, by_layer
from steadytrain.components.shared.events.types import (
    LayersCounted,
    NoiseScaleMeasured,
    TrainingStep,
    Validated,
)
from steadytrain.components.shared.quantities import duration, moment, number, size
from steadytrain.components.train.recovery.history import AttemptHistory
from steadytrain.components.train.recovery.times import Span, Times

E = TypeVar("E", TrainingStep, Validated, NoiseScaleMeasured)
_Measure = Callable[[TrainingStep], float]
_MEASURES: Final[Sequence[tuple[str, str, _Measure]]] = (
    ("Learning rate", "learning rate", lambda event: event.learning_rate),
    ("Gradient norm, before clipping", "gradient norm", lambda event: event.grad_norm),
    ("Tokens per second", "tokens/s", lambda event: event.tokens_per_second),
)
"""Title of the figure, name of the curve, and value."""


def training_figures(facts: Facts) -> list[Figure]:
    """Return loss, other validation scores, learning rate, gradients, throughput and memory."""
    marks = [
        (float(item.first_step), f"attempt {item.number} started at step {item.first_step}")
        for item in attempts(facts)[1:]
    ]

    def figure(
        title: str, curves: Sequence[Curve], show: Format = number, *, from_zero: bool = True
    ) -> Figure:
        drawn = [curve for curve in curves if curve.points or curve.broken]
        chart = line_chart(title, drawn, show=show, marks=marks, from_zero=from_zero)
        legend = [curve.name for curve in drawn] if len(drawn) > 1 else []
        return Figure(title, chart, legend, _caption(drawn, show), drawn)

    loss = [_training(facts, "training", lambda event: event.loss), _validation(facts, "loss")]
    figures = [figure("Loss", loss, from_zero=False)]
    figures += [
        figure(f"Validation {name}", [_validation(facts, name, name)], from_zero=False)
        for name in _other_scores(facts)
    ]
    figures += [figure(title, [_training(facts, name, value)]) for title, name, value in _MEASURES]
    figures += [
        figure("Critical batch size, in sequences", _critical_batch_size(facts)),
        figure("Memory of rank 0", _memory(facts), size),
    ]
    return [figure for figure in figures if figure.svg]


def compared_figures(facts: Sequence[Facts]) -> list[Figure]:
    """Return a figure for each measure, with a curve for each run."""
    names = [item.workspace.run_id for item in facts]

    def figure(
        title: str, value: _Measure | None, show: Format = number, *, from_zero: bool = True
    ) -> Figure:
        curves = [
            _training(item, name, value) if value else _validation(item, "loss", name)
            for item, name in zip(facts, names, strict=True)
        ]
        # A run without points keeps its color in the other figures.
        chart = line_chart(title, curves, show=show, from_zero=from_zero)
        return Figure(title, chart, names, "", curves)

    figures = [
        figure("Training loss", lambda event: event.loss, from_zero=False),
        figure("Validation loss", None, from_zero=False),
        *(figure(title, value) for title, _, value in _MEASURES),
        figure("Memory of rank 0", memory, size),
    ]
    return [figure for figure in figures if figure.svg]


def memory(event: TrainingStep) -> float:
    """Return the memory that a rank uses on its device, or else in its process."""
    return event.gpu_memory_used or event.memory_used


def validation_rows(facts: Facts, limit: int = 30) -> tuple[list[str], list[tuple[str, list[str]]]]:
    """Return the newest validations as a table: its columns, and rows of a step and its scores."""
    events = without_repeats(facts.of(Validated))[-limit:]
    names = list(dict.fromkeys(name for event in events for name in event.metrics))
    rows = [
        (
            number(event.step),
            [
                *(number(event.metrics.get(name)) for name in names),
                "best so far" if event.best else "",
            ],
        )
        for event in events
    ]
    return [*names, ""], rows


def without_repeats(events: Iterable[E]) -> list[E]:
    """Return the events of the steps that led to the final model.

    An attempt that resumes from a checkpoint repeats the steps after it, so earlier events of these
    steps no longer count.
    """
    kept: list[E] = []
    for event in events:
        while kept and kept[-1].step >= event.step:
            kept.pop()
        kept.append(event)
    return kept


def _training(facts: Facts, name: str, value: _Measure) -> Curve:
    """Return a measure of the training steps that count."""
    return _curve(
        name, ((event.step, value(event)) for event in without_repeats(facts.of(TrainingStep)))
    )


def _validation(facts: Facts, metric: str, name: str = "validation") -> Curve:
    """Return a validation score by step."""
    events = without_repeats(facts.of(Validated))
    return _curve(
        name, ((event.step, event.metrics[metric]) for event in events if metric in event.metrics)
    )


def _curve(name: str, points: Iterable[Point]) -> Curve:
    finite: list[Point] = []
    broken: list[float] = []
    for step, value in points:
        if math.isfinite(value):
            finite.append((step, value))
        else:
            broken.append(step)
    return Curve(name, finite, broken)


def _other_scores(facts: Facts) -> list[str]:
    """Return the validation metrics to draw besides the loss. Perplexity only repeats the loss."""
    names = dict.fromkeys(name for event in facts.of(Validated) for name in event.metrics)
    return [name for name in names if name not in ("loss", "perplexity", "weight")]


def layer_rows(facts: Facts) -> tuple[str, list[tuple[str, list[str]]]]:
    """Return the caption and the rows of a table with the newest histograms of each layer.

    Both are empty if there are none.
    """
    counted = facts.of(LayersCounted)
    if not counted:
        return "", []
    weights, gradients = (by_layer(it) for it in (counted[-1].weight, counted[-1].gradient))
    rows = [
        (layer, [_drawn(each[layer]) if layer in each else "none" for each in (weights, gradients)])
        for layer in weights
    ]
    step = number(counted[-1].step)
    return f"How many values lie where between a layer's lowest and highest, at step {step}", rows


def _drawn(shown: Histogram) -> str:
    most = max(shown.counts) or 1
    bars = text_bars(count / most for count in shown.counts)
    return f"{number(shown.low)} {bars} {number(shown.high)}"


def _critical_batch_size(facts: Facts) -> list[Curve]:
    """Return the noise scale in sequences, and the global batch size next to it."""
    points = [
        (event.step, event.critical_batch_size)
        for event in without_repeats(facts.of(NoiseScaleMeasured))
        if event.critical_batch_size is not None
    ]
    curves = [Curve("critical batch size", points)] if points else []
    size = facts.setting("training.global_batch_size")
    if points and isinstance(size, int):
        curves.append(Curve("global batch size", [(step, size) for step, _ in points]))
    return curves


def _memory(facts: Facts) -> list[Curve]:
    curves = [_training(facts, "process", lambda event: event.memory_used)]
    if any(event.gpu_memory_used for event in facts.of(TrainingStep)):
        curves.append(_training(facts, "GPU", lambda event: event.gpu_memory_used))
    return curves


def _caption(curves: Sequence[Curve], show: Format) -> str:
    sentences = [
        f"{curve.name} {show(curve.points[-1][1])} at step {number(curve.points[-1][0])}"
        for curve in curves
        if curve.points
    ]
    sentences += [
        f"{curve.name} not finite at {len(curve.broken)} logged steps (red)"
        for curve in curves
        if curve.broken
    ]
    return "; ".join(sentences)


# Draw the attempts at training on one time axis, as inline SVG.
#
# Each attempt has a row. The colors show the kinds of time.

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
    across, shortened = _time_scale(spans)
    pitch = min(ROW, TALLEST / len(attempts))
    rows = {item.started.attempt: index for index, item in enumerate(attempts)}
    base = TOP + pitch * len(attempts)
    parts = [_axis(spans, across, shortened, base)]
    every = math.ceil(LABEL / pitch)
    parts += [
        _label(item, TOP + pitch * (index + 0.5) + 4)
        for index, item in enumerate(attempts)
        if index % every == 0
    ]
    for span in _drawable(spans, across):
        top = TOP + pitch * rows[span.attempt]
        parts.append(_bar(span, across, top, pitch, shortened=span.start in shortened))
    description = f"{len(attempts)} attempts in {duration(Times.of(spans).wall)}"
    return svg("Timeline", description, parts, WIDTH, base + BOTTOM, "timeline")


def _time_scale(spans: Sequence[Span]) -> tuple[Callable[[float], float], set[float]]:
    """Return a function from times to pixels, and the starts of the waits drawn shorter."""
    working = sum(span.seconds for span in spans if span.kind != "waiting")
    longest = LONGEST_WAIT * working if working else math.inf
    shortened = {span.start for span in spans if span.kind == "waiting" and span.seconds > longest}
    drawn = [longest if span.start in shortened else span.seconds for span in spans]
    unit = (WIDTH - LEFT - RIGHT) / sum(drawn)
    edges = [LEFT + unit * seconds for seconds in accumulate(drawn, initial=0.0)]
    starts = [span.start for span in spans]

    def position(time: float) -> float:
        index = max(0, bisect(starts, time) - 1)
        share = (time - spans[index].start) / (spans[index].end - spans[index].start)
        return edges[index] + share * (edges[index + 1] - edges[index])

    return position, shortened


def _drawable(spans: Sequence[Span], across: Callable[[float], float]) -> list[Span]:
    """Merge spans, so that a long run still has a small page.

    Adjacent spans of one kind become one span. A checkpoint too narrow to see joins the span before
    it.
    """
    kept: list[Span] = []
    for span in spans:
        width = across(span.end) - across(span.start)
        before = kept[-1] if kept else None
        narrow = span.kind == "checkpointing" and width < NARROWEST
        if before and before.attempt == span.attempt and (narrow or before.kind == span.kind):
            skipped = before.skipped + span.skipped
            kept[-1] = Span(before.kind, before.attempt, before.start, span.end, skipped)
        else:
            kept.append(span)
    return kept


def _bar(
    span: Span, across: Callable[[float], float], top: float, pitch: float, *, shortened: bool
) -> Markup:
    left, right = across(span.start), across(span.end)
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
    spans: Sequence[Span], across: Callable[[float], float], shortened: set[float], base: float
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
            x = across(start + index * step)
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
