"""What counts as a number in a configuration."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from typing import TypeGuard


def is_number(value: object) -> TypeGuard[float]:
    """Return whether a value is a number. In Python, true and false are integers too."""
    return isinstance(value, int | float) and not isinstance(value, bool)


# Numbers, durations, sizes and times as people read them: in the terminal, pages and errors.
#
# Sizes are decimal, as on data sheets of GPUs and disks: 1 GB is 10^9 bytes.

LATEST = 253_402_300_799.0
"""The end of the year 9999, the limit of calendar functions."""
_DURATIONS = ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s"))
_SIZES = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


def duration(seconds: float) -> str:
    """Format seconds as 4.2 s, 12 s, 3 min 05 s, 1 h 05 min, or 2 d 03 h; NaN as unknown."""
    if not math.isfinite(seconds):
        return "unknown"
    for unit, name, lower, lower_name in _DURATIONS:
        # Round to what is shown, so that 59 min 59.9 s is 1 h and not 59 min 60 s.
        count, remainder = divmod(round(seconds / lower), unit // lower)
        if count > 0:
            return f"{count} {name}" + (f" {remainder:02d} {lower_name}" if remainder else "")
    return f"{round(seconds, 1 if seconds < 9.95 else None):g} s"


def durations(low: float, high: float) -> str:
    """Format an interval of seconds as 12 s to 3 min 05 s; once if both ends read the same."""
    return " to ".join(dict.fromkeys(map(duration, (low, high))))


def money(usd: float) -> str:
    """Format USD as $12.30, or as less than $0.01."""
    return f"${usd:,.2f}" if usd >= 0.005 or usd == 0 else "less than $0.01"


def size(count: float) -> str:
    """Format bytes with three digits, as 512 B, 1.5 kB, 12.3 MB, or 5.5 GB."""
    for unit, name in _SIZES:
        # From 999.5 on, three digits round up to the next unit.
        if abs(count) >= 0.9995 * unit:
            return f"{float(f'{count / unit:.3g}'):,g} {name}"
    return f"{count:.0f} B"


def number(value: float | int | None, digits: int = 4) -> str:
    """Format a number: 1,234,567 if it is whole, or else `digits` significant digits.

    Numbers below 0.001, and from a million on, have one digit less. Digits before the decimal point
    are never dropped. None becomes "".
    """
    if value is None:
        return ""
    if not math.isfinite(value):
        return "not finite"
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    if not 1e-3 <= abs(value) < 1e6:
        return f"{value:.{digits - 1}g}"
    before_point = math.floor(math.log10(abs(value))) + 1
    return f"{value:,.{max(0, digits - before_point)}f}"


def percent(share: float) -> str:
    """Format a fraction of 1 as a percentage."""
    return f"{share:.1%}"


def moment(time: float) -> str:
    """Format a timestamp in UTC."""
    return datetime.fromtimestamp(min(time, LATEST), UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def amount(number: float) -> str:
    """Format a number for people: 950, 12.3k, 4.56M, 1.2G."""
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(number) >= limit:
            return f"{number / (1e3 if unit == 'k' else limit):.3g}{unit}"
    return f"{number:,.0f}" if abs(number) >= 10 or number == round(number) else f"{number:.2g}"


def timestamp(time: float) -> str | None:
    """Return a timestamp (seconds since 1970) for programs; None for 0, which means unknown."""
    return datetime.fromtimestamp(time, UTC).isoformat(timespec="seconds") if time else None
