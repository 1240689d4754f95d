"""The frequency of series is inferred, and times that do not fit it are errors."""

from __future__ import annotations

from itertools import pairwise

import pandas as pd
import pytest

from steadytrain.components.series.model import inferred, moment


@pytest.mark.parametrize(
    ("alias", "frequency", "season"),
    [
        ("MS", "1 month", 12),
        ("ME", "1 month", 12),
        ("QS", "3 months", 4),
        ("YE", "12 months", 1),
        ("D", "1 day", 7),
        ("B", "1 business day", 5),
        ("W-SUN", "1 week", 52),
        ("h", "1 hour", 24),
        ("30min", "30 minutes", 48),
        ("15D", "15 days", 1),
    ],
)
def test_frequency_is_inferred_as_pandas_writes_it_with_gaps(alias, frequency, season):
    times = pd.date_range("2019-12-27", periods=60, freq=alias)
    texts = [str(time) for time in times]
    calendar = inferred({"a": texts[:20] + texts[23:], "b": texts[5:50]})
    assert (calendar.frequency, calendar.season) == (frequency, season)
    ordinals = [calendar.ordinal(text) for text in texts]
    assert {after - before for before, after in pairwise(ordinals)} == {calendar.step}
    assert [pd.Timestamp(calendar.text(ordinal)) for ordinal in ordinals] == list(times)


def test_whole_numbers_and_zones_are_read():
    years = inferred({"": ["1700", "1701", "1703"]})
    assert (years.frequency, years.text(years.ordinal("1702.0"))) == ("1", "1702")
    zoned = inferred({"": ["2024-03-31T01:00+01:00", "2024-03-31T03:00+02:00"]})
    assert zoned.frequency == "1 hour"
    assert zoned.text(zoned.ordinal("2024-03-31T00:00:00Z")) == "2024-03-31T00:00:00Z"
    assert moment("20240531").text == moment("2024-05-31").text == "2024-05-31"
    assert moment("2024-05").text == "2024-05-01"


@pytest.mark.parametrize("text", ["31.05.2024", "05/31/2024", "May 2024", "12:30", "2024-13-01"])
def test_other_forms_of_a_time_are_refused(text):
    with pytest.raises(ValueError, match=r"ISO 8601|month must be"):
        moment(text)


@pytest.mark.parametrize(
    ("series", "message"),
    [
        ({"a": ["2024-01-01", "2024-01-02", "3"]}, "different kinds"),
        ({"a": ["2024-01-01", "2024-01-02T00:00Z"]}, "different kinds"),
        (
            {
                "a": ["2024-01-01", "2024-01-02", "2024-01-03"],
                "b": ["2024-01-02", "2024-01-09", "2024-01-16"],
            },
            "mixed: the times of the series '[ab]' are mostly 1 (day|week) apart",
        ),
        (
            {"a": ["2024-01-01", "2024-01-08", "2024-01-15", "2024-01-18"]},
            "has 2024-01-15 and then 2024-01-18, and most of its times are 1 week apart",
        ),
        ({"a": ["2024-01-01"], "b": ["2024-01-01"]}, "no series has two times"),
    ],
)
def test_irregular_times_are_errors(series, message):
    with pytest.raises(ValueError, match=message):
        inferred(series)


def test_a_time_off_the_calendar_is_an_error():
    calendar = inferred({"": ["2024-01-01", "2024-02-01", "2024-03-01"]})
    with pytest.raises(ValueError, match="1 month apart"):
        calendar.ordinal("2024-04-02")
    with pytest.raises(ValueError, match="not among dates"):
        calendar.ordinal("7")
