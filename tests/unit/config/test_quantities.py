"""Durations and sizes are written the same way everywhere."""

from __future__ import annotations

import re

import pytest

from steadytrain.components.shared.quantities import duration, money, size

from support.snippets import ROOT


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (4.21, "4.2 s"),
        (9.96, "10 s"),
        (59.4, "59 s"),
        (59.7, "1 min"),
        (185, "3 min 05 s"),
        (3599.9, "1 h"),
        (3900, "1 h 05 min"),
        (86399, "1 d"),
        (93785, "1 d 02 h"),
        (float("nan"), "unknown"),
    ],
)
def test_duration_has_at_most_two_units(seconds, text):
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1536, "1.54 kB"),
        (999_499, "999 kB"),
        (999_500, "1 MB"),
        (5.5e9, "5.5 GB"),
        (2**50, "1,130 TB"),
    ],
)
def test_size_has_three_digits_and_a_decimal_unit(count, text):
    assert size(count) == text


OTHER_FORMATS = re.compile(r"\}\s?[kKMGT]i?B\b|:\.[0-9]f\} s\b")
IN_GB = {"components/plan", "components/sizing", "components/memory"}
"""The planner compares many sizes in one table, all in GB."""


def test_no_other_code_writes_its_own_units():
    code = [*(ROOT / "components").rglob("*.py"), *(ROOT / "pipelines").rglob("*.py")]
    odd = [
        f"{path.relative_to(ROOT)}: {found.group()}"
        for path in code
        if not any(path.is_relative_to(ROOT / folder) for folder in IN_GB)
        for found in OTHER_FORMATS.finditer(path.read_text())
    ]
    assert not odd


@pytest.mark.parametrize(
    ("usd", "text"),
    [(0, "$0.00"), (0.0001, "less than $0.01"), (0.012, "$0.01"), (1234.5, "$1,234.50")],
)
def test_money_never_rounds_a_cost_to_nothing(usd, text):
    assert money(usd) == text
