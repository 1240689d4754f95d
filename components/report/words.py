"""Numbers, sizes and times as people read them."""

from __future__ import annotations

import math
from datetime import UTC, datetime

from steadytrain.components.shared.events.types import LATEST


def number(value: float | int | None, digits: int = 4) -> str:
    """1,234,567 for whole numbers, four significant digits for others, "" for none."""
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
    """A share of one."""
    return f"{share:.1%}"


def size(count: float) -> str:
    """Bytes in a unit that fits."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.4g} {unit}" if abs(count) >= 100 else f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:,.4g} TiB"


def duration(seconds: float) -> str:
    """Seconds as 12.3 s, 3 min 05 s, 2 h 04 min."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min"


def moment(time: float) -> str:
    """A time of the clock, in UTC."""
    return datetime.fromtimestamp(min(time, LATEST), UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
