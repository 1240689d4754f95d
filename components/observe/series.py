"""A run's metrics over the last minutes, for alerts that do not need Prometheus."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Final

from steadytrain.components.observe.samples import Samples

KEPT_SECONDS: Final = 3600.0
"""How far back the values go."""

Values = Mapping[tuple[str, str], float]


class Series:
    """Samples of the metrics in the order of time. Answers as PromQL would."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, Values]] = deque()

    def add(self, time: float, samples: Samples) -> None:
        """Add the values of a time, and forget those that are too old."""
        self._samples.append((time, samples.values))
        while self._samples[0][0] < time - KEPT_SECONDS:
            self._samples.popleft()

    @property
    def now(self) -> float:
        """The time of the newest sample."""
        return self._samples[-1][0]

    @property
    def names(self) -> set[str]:
        """The metrics that have a value now."""
        return {name for name, _ in self._samples[-1][1]}

    def value(self, name: str) -> float:
        """Return the newest value of a metric, summed over its label; NaN if there is none."""
        found = [value for (metric, _), value in self._samples[-1][1].items() if metric == name]
        return sum(found) if found else math.nan

    def mean(self, name: str, seconds: float, *, offset: float = 0.0) -> float:
        """Return the mean over a window that ended `offset` seconds ago; NaN without values."""
        found = list(self._window(name, seconds, offset))
        return sum(found) / len(found) if found else math.nan

    def increase(self, name: str, seconds: float) -> float:
        """Return by how much a counter has increased in the last seconds."""
        found = list(self._window(name, seconds, 0.0))
        return found[-1] - found[0] if found else 0.0

    def age(self, timestamp: str) -> float:
        """Return the seconds since a time, or since the attempt started if that is later."""
        started = self.value("attempt_started_timestamp_seconds")
        times = [when for when in (self.value(timestamp), started) if not math.isnan(when)]
        return self.now - max(times, default=self.now)

    def _window(self, name: str, seconds: float, offset: float) -> Iterator[float]:
        end = self.now - offset
        for time, values in self._samples:
            if end - seconds < time <= end and (name, "") in values:
                yield values[name, ""]
