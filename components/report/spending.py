"""Training's time and its cost, in words and in numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Final

from steadytrain.components.report.facts import Facts
from steadytrain.components.shared.quantities import duration, is_number, percent
from steadytrain.components.train.recovery.times import Times

MEANINGS: Final = {
    "useful": "produced the current result",
    "lost": "work that was repeated or discarded, including the time to notice and end the failure",
    "restarting": "from the start of the ranks to their first step, including the first start",
    "checkpointing": "training paused for a checkpoint",
    "waiting": "no ranks: between attempts, and between supervisors",
}
"""The kinds of time, in display order."""


@dataclass(frozen=True)
class Spending:
    """The time that training needed, and the price of it.

    price_per_hour: in USD; None if it is not configured.
    """

    times: Times
    price_per_hour: float | None

    @classmethod
    def of(cls, facts: Facts) -> Spending:
        price = facts.setting("compute.price_per_hour")
        return cls(Times.of(facts.spans), float(price) if is_number(price) else None)

    @property
    def rows(self) -> list[tuple[str, list[str], float]]:
        """Rows of kind; time, share of the wall clock and meaning; and seconds."""
        return [
            (kind, [duration(took), percent(took / (self.times.wall or 1.0)), MEANINGS[kind]], took)
            for kind, took in asdict(self.times).items()
        ]

    @property
    def cost(self) -> str:
        """The cost in one sentence, or how to configure it."""
        if self.price_per_hour is None:
            return "not known: set compute.price_per_hour (USD, for all nodes together)"
        times, price = self.times, self.price_per_hour
        wasted = times.cost(price) - price * times.useful / 3600
        return (
            f"{times.cost(price):,.2f} USD at {price:,.2f} USD per hour, without waits; "
            f"{wasted:,.2f} USD of that was not useful"
        )

    def lines(self) -> list[str]:
        """Return lines for a terminal, empty before the first attempt."""
        if not self.times.wall:
            return []
        shares = ", ".join(f"{kind} {share}" for kind, (_, share, _), _ in self.rows)
        return [
            f"training: {duration(self.times.wall)}: {shares}",
            f"goodput: {percent(self.times.goodput)}",
            f"cost: {self.cost}",
        ]

    def metrics(self) -> Mapping[str, float]:
        """Return metrics for MLflow by name, empty before the first attempt."""
        if not self.times.wall:
            return {}
        found = {f"time_{kind}_seconds": seconds for kind, seconds in asdict(self.times).items()}
        found |= {"training_duration_seconds": self.times.wall, "goodput": self.times.goodput}
        if self.price_per_hour is not None:
            found["cost_usd"] = self.times.cost(self.price_per_hour)
        return found
