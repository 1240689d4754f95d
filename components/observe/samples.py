"""The current values of metrics, checked against the registry."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

from steadytrain.components.observe.registry import METRICS


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
