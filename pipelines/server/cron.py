"""Cron in a time zone, as a KFP server understands it: six fields, in the server's own zone.

KFP reads a five-field cron as if its first field were seconds, and has no time zone per schedule.
So what people write (five fields, or six with seconds) is always sent as six fields, with its hours
converted to the server's zone.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final, Literal
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

Rounding = Literal["standard", "summer"]

_DAY: Final = 24 * 60
_MONTHS = ["JAN", "FEB", "MAR", "APR", "MAY", "JUN", "JUL", "AUG", "SEP", "OCT", "NOV", "DEC"]
_DAYS = ["SUN", "MON", "TUE", "WED", "THU", "FRI", "SAT"]
_PART = re.compile(r"(?P<first>\*|\?|\w+)(?:-(?P<last>\w+))?(?:/(?P<step>\d+))?")


@dataclass(frozen=True)
class _Field:
    name: str
    low: int
    high: int
    names: tuple[str, ...] = ()

    def values(self, text: str) -> frozenset[int]:
        """Return the numbers that a field's text stands for.

        Raises:
            ValueError: the text is not valid; the message says why.
        """
        return frozenset(number for part in text.split(",") for number in self._part(part))

    def text(self, values: Iterable[int]) -> str:
        found = sorted(values)
        every = len(found) == self.high - self.low + 1
        return "*" if every else ",".join(map(str, found))

    def _part(self, part: str) -> range:
        match = _PART.fullmatch(part)
        if not match:
            raise ValueError(f"{part!r} is not a valid {self.name}")
        first, last, step = match["first"], match["last"], int(match["step"] or 1)
        if first in "*?":
            low, high = self.low, self.high
        else:
            low = self._number(first)
            # Like robfig/cron, which KFP uses: 5/15 goes from 5 to the end.
            high = self._number(last) if last else self.high if match["step"] else low
        if high < low or step < 1:
            raise ValueError(f"{part!r} goes backwards")
        return range(low, high + 1, step)

    def _number(self, text: str) -> int:
        if text.upper() in self.names:
            return self.names.index(text.upper()) + self.low
        if not text.isdecimal() or not self.low <= int(text) <= self.high:
            raise ValueError(f"{text!r} is not a valid {self.name} ({self.low} to {self.high})")
        return int(text)


_FIELDS = (
    _Field("second", 0, 59),
    _Field("minute", 0, 59),
    _Field("hour", 0, 23),
    _Field("day of the month", 1, 31),
    _Field("month", 1, 12, tuple(_MONTHS)),
    _Field("day of the week", 0, 6, tuple(_DAYS)),
)


def six_fields(cron: str) -> list[str]:
    """Return the six fields of a cron. Five fields get the second 0.

    Raises:
        ValueError: the cron is not valid; the message names the field.
    """
    fields = cron.split()
    fields = ["0", *fields] if len(fields) == 5 else fields
    if len(fields) != 6:
        raise ValueError("give five fields (minute, hour, day, month, weekday), or six: seconds")
    for field, text in zip(_FIELDS, fields, strict=True):
        field.values(text)
    return fields


def zone(name: str) -> ZoneInfo:
    """Return a time zone by its IANA name.

    Raises:
        ValueError: there is no such zone.
    """
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError) as error:
        raise ValueError(f"{name!r} is not a time zone, such as UTC or Europe/Berlin") from error


def ahead(here: ZoneInfo, server: ZoneInfo, rounding: Rounding | None) -> int:
    """Return how many minutes a zone is ahead of the server's, all year round.

    Args:
        rounding: which difference to use if it changes within the year. "standard" means the
            smaller one, which is that of standard time if the server's zone has no daylight saving.
            "summer" means the larger one.

    Raises:
        ValueError: the difference changes, and `rounding` is None.
    """
    today = datetime.now(UTC)
    days = [today + timedelta(days=number) for number in range(370)]
    found = {int(_offset(here, day) - _offset(server, day)) for day in days}
    if len(found) > 1 and rounding is None:
        raise ValueError(
            f"{here.key} has daylight saving, and the server's {server.key} does not follow it"
        )
    return max(found) if rounding == "summer" else min(found)


def in_server_time(cron: str, minutes_ahead: int) -> str:
    """Convert a cron to the server's zone, in six fields.

    Raises:
        ValueError: no single cron has the same meaning there; the message says why.
    """
    fields = six_fields(cron)
    if not minutes_ahead:
        return " ".join(fields)
    minutes, hours, days, months, weekdays = (
        field.values(text) for field, text in zip(_FIELDS[1:], fields[1:], strict=True)
    )
    moved = [divmod(60 * h + m - minutes_ahead, _DAY) for h in hours for m in minutes]
    times = {time for _, time in moved}
    moved_hours, moved_minutes = {time // 60 for time in times}, {time % 60 for time in times}
    if len(moved_hours) * len(moved_minutes) != len(times):
        raise ValueError("in the server's zone its minutes differ from hour to hour")
    shifts, any_day = {shift for shift, _ in moved}, len(weekdays) == 7 and len(days) == 31
    if shifts != {0} and not (any_day and len(months) == 12):
        if len(shifts) > 1 or len(days) < 31 or len(months) < 12:
            raise ValueError("in the server's zone it falls on other days")
        weekdays = frozenset((day + min(shifts)) % 7 for day in weekdays)
        fields[5] = _FIELDS[5].text(weekdays)
    fields[1], fields[2] = _FIELDS[1].text(moved_minutes), _FIELDS[2].text(moved_hours)
    return " ".join(fields)


def _offset(here: ZoneInfo, moment: datetime) -> float:
    offset = moment.astimezone(here).utcoffset() or timedelta()
    return offset.total_seconds() / 60
