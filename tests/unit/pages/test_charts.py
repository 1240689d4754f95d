"""Charts, and curves as text."""

from __future__ import annotations

import math
from itertools import pairwise
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steadytrain.components.pages.charts import (
    Curve,
    line_chart,
    nice_ticks,
    spark_line,
    spark_picture,
    thin,
)
from steadytrain.components.report.figures import without_repeats
from steadytrain.components.shared.events.types import Validated
from steadytrain.components.shared.quantities import moment, number, percent

finite = st.floats(min_value=-1e12, max_value=1e12, allow_nan=False)


@given(finite, finite)
def test_few_ticks_enclose_the_values(one: float, other: float) -> None:
    low, high = min(one, other), max(one, other)
    ticks = nice_ticks(low, high)
    slack = (ticks[-1] - ticks[0]) * 1e-6
    assert ticks[0] <= low + slack
    assert ticks[-1] >= high - slack
    assert 2 <= len(ticks) <= 8
    assert all(after > before for before, after in pairwise(ticks))


def test_ticks_of_the_largest_numbers_are_finite() -> None:
    assert all(math.isfinite(tick) for tick in nice_ticks(-1.7e308, 1.7e308))


@given(st.lists(finite, min_size=1, max_size=3000))
def test_thinned_points_keep_ends_and_extremes(values: list[float]) -> None:
    points = list(enumerate(values))
    kept = thin(points, 100)
    assert len(kept) <= 102
    assert set(kept) <= set(points)
    assert [step for step, _ in kept] == sorted(step for step, _ in kept)
    assert (kept[0], kept[-1]) == (points[0], points[-1])
    assert min(y for _, y in kept) == min(values)
    assert max(y for _, y in kept) == max(values)


def validated(attempt: int, step: int) -> Validated:
    return Validated(attempt=attempt, step=step, epoch=0, metrics={}, best=False)


def test_repeated_steps_replace_their_earlier_values() -> None:
    events = [validated(1, step) for step in (1, 2, 3, 4)] + [validated(2, 3), validated(2, 4)]
    assert [(event.attempt, event.step) for event in without_repeats(events)] == [
        (1, 1),
        (1, 2),
        (2, 3),
        (2, 4),
    ]


def test_charts_of_one_point_broken_points_and_no_points() -> None:
    assert line_chart("Loss", [Curve("a", [])]) == ""
    assert line_chart("Loss", [Curve("a", [], broken=[1])]) == ""
    one = ElementTree.fromstring(line_chart("Loss", [Curve("a", [(5, 1.0)])]))
    assert len(list(one.iter("circle"))) == 1
    broken = ElementTree.fromstring(line_chart("Loss", [Curve("a", [(5, 1.0)], broken=[6, 7])]))
    assert len(list(broken.iter("path"))) == 2


def test_chart_says_what_it_shows() -> None:
    chart = line_chart("Loss", [Curve("training", [(1, 4.5), (20, 1.25)])])
    label = ElementTree.fromstring(chart).attrib["aria-label"]
    assert label == "Loss. training: 4.500 at step 1, 1.250 at step 20"


def test_chart_from_zero() -> None:
    curve = Curve("tokens/s", [(1, 1000.0), (2, 1010.0)])
    texts = [item.text for item in ElementTree.fromstring(line_chart("T", [curve])).iter("text")]
    assert "0" not in texts
    drawn = ElementTree.fromstring(line_chart("T", [curve], from_zero=True))
    assert "0" in [item.text for item in drawn.iter("text")]


def test_marks_are_drawn() -> None:
    curve = Curve("a", [(0, 1.0), (10, 2.0)])
    chart = ElementTree.fromstring(line_chart("L", [curve], marks=[(5, "attempt <2>")]))
    assert [item.text for item in chart.iter("title")] == ["attempt <2>"]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, ""),
        (0, "0"),
        (0.0, "0"),
        (3.0, "3"),
        (1234567, "1,234,567"),
        (1234.5678, "1,235"),
        (12.34567, "12.35"),
        (0.0349, "0.03490"),
        (0.9, "0.9000"),
        (-0.5, "-0.5000"),
        (1.2345e-5, "1.23e-05"),
        (1.5e20, "1.5e+20"),
        (math.nan, "not finite"),
        (math.inf, "not finite"),
    ],
)
def test_numbers(value: float | None, text: str) -> None:
    assert number(value) == text


def test_shares_and_moments() -> None:
    assert percent(0.0485) == "4.9%"
    assert moment(0) == "1970-01-01 00:00:00 UTC"


@pytest.mark.parametrize(
    ("values", "width", "line"),
    [
        ([], 8, ""),
        ([1.0], 8, "▁"),
        ([math.nan, math.inf], 8, ""),
        ([0.0, 7.0], 8, "▁█"),
        (range(8), 8, "▁▂▃▄▅▆▇█"),
        ([3.0, 3.0, 3.0], 8, "▁▁▁"),
        ([0.0, math.nan, 7.0], 8, "▁█"),
        ([-1.7e308, 1.7e308], 8, "▁█"),
    ],
)
def test_line_of_text(values: list[float], width: int, line: str) -> None:
    assert spark_line(list(values), width) == line


def test_line_of_text_keeps_its_width_and_spikes() -> None:
    line = spark_line([1.0] * 500 + [9.0] + [1.0] * 500, 24)
    assert len(line) <= 24
    assert "█" in line


def test_picture_needs_two_values() -> None:
    assert spark_picture([1.0]) == ""
    assert 'points="0.0,20.0 96.0,20.0"' in spark_picture([1.0, 1.0])
    assert 'points="0.0,20.0 96.0,2.0"' in spark_picture([-1.7e308, 1.7e308])
