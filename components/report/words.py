"""Format numbers and times of the clock for people. See also `shared/quantities.py`."""

from __future__ import annotations

import math
from datetime import UTC, datetime

from steadytrain.components.shared.events.types import LATEST


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
