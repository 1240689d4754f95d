"""Numbers of steps that may be shares of a run."""

from __future__ import annotations

import math


def whole_steps(value: float, steps: int) -> int:
    """Return a number of steps; a value below 1 is a fraction of all `steps`."""
    return int(value) if value >= 1 else math.ceil(steps * value)
