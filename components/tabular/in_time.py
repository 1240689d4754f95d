"""The times of a table's records, and parts of the records that follow each other in time."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import accumulate
from typing import Any, Final, NamedTuple

import numpy as np

from steadytrain.components.tabular.model import is_missing, plain_number
from steadytrain.components.tasks.encoding.fields import Defect

_MONTH: Final = re.compile(r"\d{4}-\d{2}")


class Time(NamedTuple):
    """When a record was made.

    kind: "number", "date" or "zoned": a date with a time zone.
    """

    kind: str
    value: float | datetime


def time_of(name: str, value: Any) -> Time:
    """Return the time in a column: a number, or a date or time in ISO 8601.

    Raises:
        Defect: it is absent, or something else.
    """
    if is_missing(value):
        raise Defect("missing_field", f"{name[:80]} (the time) is absent, null or empty")
    number = plain_number(value)
    if number == number:
        return Time("number", number)
    try:
        text = str(value).strip()
        time = datetime.fromisoformat(f"{text}-01" if _MONTH.fullmatch(text) else text)
        if time.tzinfo is None:
            return Time("date", time)
        # In UTC, one moment has one form.
        return Time("zoned", time.astimezone(UTC).replace(tzinfo=None))
    except (ValueError, OverflowError) as error:
        raise Defect(
            "wrong_type",
            f"{name[:80]} is {str(value)[:40]!r}, neither a date or time in ISO 8601 nor a number",
        ) from error


def parts_of(times: Sequence[Time], shares: Sequence[float]) -> list[int]:
    """Return the part of each record, from the earliest part to the latest.

    Records of one time are in one part: that which the middle one of them belongs to. Each part has
    at least one time.

    Args:
        shares: of the records, by part.

    Raises:
        ValueError: there are fewer times than parts, or they are of different kinds.
    """
    counts = Counter(times)
    if len(kinds := {time.kind: time for time in counts}) > 1:
        both = " and ".join(sorted(str(time.value) for time in kinds.values()))
        raise ValueError(f"times are of different kinds: {both}")
    ordered = sorted(counts)
    if len(ordered) < len(shares):
        raise ValueError(
            f"its {len(ordered):,} different times cannot be divided into {len(shares)} parts"
        )
    sizes = np.array([counts[time] for time in ordered])
    middles = sizes.cumsum() - sizes / 2
    result = np.zeros(len(ordered), np.int64)
    start = 0
    for part, share in enumerate([*accumulate(shares)][:-1], start=1):
        # Rounded, because 0.65 of 600 is not exactly 390.
        border = round(share * len(times), 6)
        wanted = int(np.searchsorted(middles, border, side="right"))
        # Later parts need a time each, too.
        start = min(max(wanted, start + 1), len(ordered) - len(shares) + part)
        result[start:] = part
    part_of = dict(zip(ordered, result.tolist(), strict=True))
    return [part_of[time] for time in times]
