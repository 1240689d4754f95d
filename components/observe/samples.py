"""The current values of metrics, checked against the registry."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from steadytrain.components.observe.registry import METRICS
from steadytrain.components.sizing.hardware import known_gpu
from steadytrain.components.train.recovery.history import AttemptHistory


@dataclass
class Distribution:
    """What a histogram has observed.

    counts: observations by bucket, not cumulative; the last one has no upper bound.
    """

    bounds: tuple[float, ...]
    counts: list[int] = field(init=False)
    sum: float = 0.0

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value


class Samples:
    """Values by metric and label value ("" for a metric without a label of its own).

    Methods raise KeyError for a metric that the registry does not have in that kind.
    """

    def __init__(self) -> None:
        self.values: dict[tuple[str, str], float] = {}
        self.distributions: dict[str, Distribution] = {}

    @classmethod
    def at_zero(cls) -> Samples:
        """Return all counters at 0: otherwise Prometheus does not see their first increase.

        The cost is left out, because it may be unknown.
        """
        samples = cls()
        for metric in METRICS.values():
            if metric.kind == "counter" and metric.name != "cost_usd":
                for label in metric.values or [""]:
                    samples.add(metric.name, 0.0, label)
        return samples

    def set(self, name: str, value: float, label: str = "") -> None:
        """Set a gauge."""
        self.values[_key(name, "gauge", label)] = value

    def add(self, name: str, amount: float, label: str = "") -> None:
        """Increase a counter. Negative amounts are ignored: a counter never decreases."""
        key = _key(name, "counter", label)
        self.values[key] = self.values.get(key, 0.0) + max(0.0, amount)

    def observe(self, name: str, value: float) -> None:
        """Add an observation to a histogram."""
        _key(name, "histogram", "")
        bounds = tuple(METRICS[name].buckets)
        self.distributions.setdefault(name, Distribution(bounds)).observe(value)


def _key(name: str, kind: str, label: str) -> tuple[str, str]:
    metric = METRICS[name]
    if metric.kind != kind or bool(metric.label) != bool(label):
        raise KeyError(f"{name} is a {metric.kind} with the label {metric.label!r}")
    return name, label


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


_PER_PARAMETER, _WITH_FROZEN_WEIGHTS = 6.0, 4.0
"""FLOPs for each parameter and token, forward and backward. Frozen weights need no gradients."""


def flops_utilization(
    attempt: AttemptHistory, tokens_per_second: float, *, adapters: bool
) -> float | None:
    """Return the share of the GPUs' peak that a speed needs; None if the peak is unknown.

    Args:
        tokens_per_second: of all ranks together.
        adapters: whether the model's own weights are frozen.
    """
    ready = attempt.ready
    gpu = known_gpu(ready.device) if ready else None
    if ready is None or gpu is None:
        return None
    peak = gpu.fp32_tflops if ready.precision == "fp32" else gpu.half_tflops
    flops = (_WITH_FROZEN_WEIGHTS if adapters else _PER_PARAMETER) * ready.parameters
    return flops * tokens_per_second / (attempt.started.world_size * peak * 1e12)
