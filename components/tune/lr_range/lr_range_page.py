"""What a range test found, in words and as an HTML page."""

from __future__ import annotations

from markupsafe import Markup

from steadytrain.components.pages.charts import WIDE, Series, scatter
from steadytrain.components.pages.html import html
from steadytrain.components.shared.quantities import number
from steadytrain.components.tune.lr_range.curve import RangeResult


def render(found: RangeResult, name: str) -> str:
    """Return the report of a range test as HTML."""
    return html(
        "lr_range",
        kind="range test",
        name=name,
        found=found,
        sentence=sentence(found),
        chart=_chart(found),
        setting=setting(found),
    )


def sentence(found: RangeResult) -> str:
    """Return the result in one or two sentences."""
    if found.low is None:
        return "The loss did not fall at any learning rate, so there is no range to suggest."
    ending = (
        f"At {number(found.exploded)} it explodes."
        if found.exploded is not None
        else "It never explodes."
    )
    return (
        f"The loss falls at learning rates from {number(found.low)} to {number(found.high)}, "
        f"fastest at {number(found.steepest)}. {ending}"
    )


def setting(found: RangeResult) -> str:
    """Return the option that makes a study search the range; "" without one."""
    if found.low is None:
        return ""
    return (
        f"--set 'tune.space={{training.learning_rate: {{low: {found.low:.2g}, "
        f"high: {found.high:.2g}, log: true}}}}'"
    )


def _chart(found: RangeResult) -> Markup:
    # What explodes would press all other losses into one line.
    first = found.points[0].smoothed if found.points else 0.0
    shown = [item for item in found.points if item.loss < 2 * first]
    dots = [((item.rate, item.loss), f"{number(item.rate)}: {number(item.loss)}") for item in shown]
    smoothed = [(item.rate, item.smoothed) for item in shown]
    ends = [end for end in (found.low, found.high) if end is not None]
    steps = [Series("trial stopped", dots=dots)]
    return scatter(
        "Loss", steps, "learning rate", log=True, through=smoothed, marks=ends, width=WIDE
    )
