"""How often a checkpoint pays: each costs time, and so does each step that is lost without one.

The interval sqrt(2 * cost * mean time between failures) makes the sum of both
smallest: J. W. Young, "A first order approximation to the optimum checkpoint
interval", CACM 17 (1974); refined by J. T. Daly, FGCS 22 (2006).
"""

from __future__ import annotations

import math
import time
from typing import Final

FIRST_SECONDS: Final = 60.0
"""Until the first checkpoint, which nobody has timed yet."""


def expected_between_failures(prior_seconds: float, run_seconds: float, failures: int) -> float:
    """Mean seconds between failures: the prior counts as one failure seen in that time.

    Args:
        run_seconds: that attempts have taken so far; failures: that ended them.
    """
    return (prior_seconds + run_seconds) / (1 + failures)


class Cadence:
    """Tells when the next checkpoint is due, by what the ones before it have cost.

    Args:
        cost: blocking and writing seconds of an earlier attempt's last checkpoint.
    """

    def __init__(
        self, between_failures_seconds: float, cost: tuple[float, float] | None = None
    ) -> None:
        self.between_failures = between_failures_seconds
        self.interval = FIRST_SECONDS
        if cost is not None:
            self.measured(*cost)
        self.began()

    def began(self) -> None:
        """A checkpoint of the present step is under way, or training begins there."""
        self._last = time.monotonic()

    def measured(self, blocking_seconds: float, writing_seconds: float) -> None:
        """Takes in what a checkpoint has cost; no interval is shorter than a write."""
        best = math.sqrt(2 * blocking_seconds * self.between_failures)
        self.interval = max(best, writing_seconds)

    @property
    def due(self) -> bool:
        """Whether the interval is over."""
        return time.monotonic() - self._last >= self.interval
