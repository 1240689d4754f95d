"""Curves without axes."""

from __future__ import annotations

import math

import pytest

from steadytrain.pipelines.view.sparks import spark_line, spark_picture


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
def test_line(values, width, line):
    assert spark_line(list(values), width) == line


def test_line_keeps_its_width_and_spikes():
    line = spark_line([1.0] * 500 + [9.0] + [1.0] * 500, 24)
    assert len(line) <= 24
    assert "█" in line


def test_picture_needs_two_values():
    assert spark_picture([1.0]) == ""
    assert 'points="0.0,20.0 96.0,20.0"' in spark_picture([1.0, 1.0])
    assert 'points="0.0,20.0 96.0,2.0"' in spark_picture([-1.7e308, 1.7e308])
