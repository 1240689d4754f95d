"""Convert cron expressions as people write them to cron as a KFP server reads it."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steadytrain.pipelines.server.schedule_file import ahead, in_server_time, six_fields, zone


def times(cron, offset_minutes, year=2027):
    """Return every moment of a year, in UTC, at which a cron in a zone with that offset is due."""
    second, *fields = cron.split()
    assert second == "0"
    limits = [(0, 59), (0, 23), (1, 31), (1, 12), (0, 6)]
    sets = [numbers(text, *limit) for text, limit in zip(fields, limits, strict=True)]
    minute, hour, day, month, weekday = sets
    begin, found = datetime(year, 1, 1), set()
    for number in range(365):
        date = begin + timedelta(days=number)
        if date.month in month and date.day in day and date.isoweekday() % 7 in weekday:
            found |= {
                date + timedelta(hours=h, minutes=m - offset_minutes) for h in hour for m in minute
            }
    # Leave out the days at both ends of the year: the offset may move them to another year.
    return {time for time in found if begin + timedelta(2) < time < begin + timedelta(363)}


def numbers(text, low, high):
    found = set()
    for part in text.split(","):
        bounds, _, step = part.partition("/")
        first, _, last = bounds.partition("-")
        begin = low if first == "*" else int(first)
        end = high if first == "*" else int(last or first)
        found |= set(range(begin, end + 1, int(step or 1)))
    return found


@pytest.mark.parametrize(
    ("cron", "minutes_ahead", "there"),
    [
        ("30 3 * * *", 0, "0 30 3 * * *"),
        ("15 30 3 ? * MON-FRI", 0, "15 30 3 ? * MON-FRI"),
        ("30 3 * * *", 60, "0 30 2 * * *"),
        ("30 0 * * *", 60, "0 30 23 * * *"),
        ("30 0 * * 1", 60, "0 30 23 * * 0"),
        ("30 0 * * MON-FRI", 60, "0 30 23 * * 0,1,2,3,4"),
        ("30 23 * * SUN", -300, "0 30 4 * * 1"),
        ("0 9 * * 1-5", 330, "0 30 3 * * 1-5"),
        ("*/15 * * * *", 345, "0 0,15,30,45 * * * *"),
        ("0 */6 * * *", 60, "0 0 5,11,17,23 * * *"),
        ("0 12 1 * *", 60, "0 0 11 1 * *"),
        ("0 12 1 JAN *", 60, "0 0 11 1 JAN *"),
    ],
)
def test_cron_is_converted_to_the_servers_zone(cron, minutes_ahead, there):
    assert in_server_time(cron, minutes_ahead) == there


@pytest.mark.parametrize(
    ("cron", "minutes_ahead", "words"),
    [
        ("30 0 1 * *", 60, "other days"),
        ("30 0 * 1 *", 60, "other days"),
        ("0 0,12 * * 1", 60, "other days"),
        ("0,45 9 * * *", 330, "differ from hour to hour"),
    ],
)
def test_schedule_that_needs_several_crons_is_rejected(cron, minutes_ahead, words):
    with pytest.raises(ValueError, match=words):
        in_server_time(cron, minutes_ahead)


@pytest.mark.parametrize(
    ("cron", "words"),
    [
        ("* * * *", "give five fields"),
        ("@daily", "give five fields"),
        ("60 * * * *", "'60' is not a valid minute \\(0 to 59\\)"),
        ("0 24 * * *", "is not a valid hour"),
        ("0 0 0 * *", "is not a valid day of the month"),
        ("0 0 * FOO *", "'FOO' is not a valid month"),
        ("0 0 * * 7", "is not a valid day of the week \\(0 to 6\\)"),
        ("5-2 * * * *", "goes backwards"),
        ("*/0 * * * *", "goes backwards"),
        ("1+2 * * * *", "'1\\+2' is not a valid minute"),
    ],
)
def test_invalid_cron_is_rejected(cron, words):
    with pytest.raises(ValueError, match=words):
        six_fields(cron)


fields = st.tuples(
    st.sampled_from(["0", "30", "*/15", "*", "5,20", "0-29"]),
    st.sampled_from(["0", "3", "23", "*", "*/6", "8-17", "22-23"]),
    st.sampled_from(["*", "1", "15", "10-20"]),
    st.sampled_from(["*", "2", "3-5"]),
    st.sampled_from(["*", "1", "1-5", "0,6"]),
)


@settings(max_examples=40, deadline=None)
@given(fields, st.sampled_from([-570, -300, -60, 60, 120, 330, 345, 780]))
def test_converted_cron_fires_at_the_same_moments(parts, minutes_ahead):
    cron = "0 " + " ".join(parts)
    try:
        there = in_server_time(cron, minutes_ahead)
    except ValueError:
        return
    assert times(there, 0) == times(cron, minutes_ahead)


def test_daylight_saving_is_rounded_only_on_request():
    berlin, utc = zone("Europe/Berlin"), zone("UTC")
    with pytest.raises(ValueError, match="Europe/Berlin has daylight saving"):
        ahead(berlin, utc, None)
    assert ahead(berlin, utc, "standard") == 60
    assert ahead(berlin, utc, "summer") == 120
    assert ahead(berlin, zone("Europe/Paris"), None) == 0
    assert ahead(zone("Asia/Kathmandu"), utc, None) == 345


def test_southern_daylight_saving_is_recognized():
    sydney = zone("Australia/Sydney")
    january = datetime(2027, 1, 1, tzinfo=UTC).astimezone(ZoneInfo("Australia/Sydney"))
    assert ahead(sydney, zone("UTC"), "summer") * 60 == january.utcoffset().total_seconds()


def test_unknown_zone_is_rejected():
    for name in ("Mars/Base", "", "../etc/passwd"):
        with pytest.raises(ValueError, match="is not a time zone"):
            zone(name)
