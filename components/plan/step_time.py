"""A step that has no formula, measured on this machine: its time, its cost, and what it stores."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from steadytrain.components.plan.stored import Stored
from steadytrain.components.shared.quantities import durations
from steadytrain.components.sizing.time_cost import Span
from steadytrain.components.train.framework import Learner

_STEPS: Final = 3
_LONG_SECONDS: Final = 5.0
"""A step that takes longer is not repeated."""


@dataclass(frozen=True)
class Measured:
    """A learner's step, and what all steps store.

    seconds: mean of a step on all rows.
    stored: after the last step.
    """

    seconds: float
    stored: Stored

    @classmethod
    def of_ensemble(cls, members: Sequence[Measured], counts: Iterable[int]) -> Self:
        """Return this of an ensemble, each of whose steps trains a member.

        What its members export includes the source of their class for each.

        Args:
            counts: steps of each member.
        """
        times = [count * step.seconds for count, step in zip(counts, members, strict=True)]
        return cls(sum(times) / len(times), Stored.total(step.stored for step in members))


def measured(learner: Learner, steps: int, scale: float = 1.0) -> Measured:
    """Measure a learner's steps on all its rows.

    Args:
        steps: that a run takes at most. What a few store is extrapolated to them.
        scale: rows that the run has, for each of the learner's.
    """
    sizes = list[Stored]()
    seconds = mean_seconds(
        lambda: learner.learn((), learning_rate_scale=1.0), lambda: sizes.append(_stored(learner))
    )
    stored = sizes[0].grown_to(steps, sizes[-1], len(sizes))
    larger = scale if getattr(learner, "stores_rows", False) else 1.0
    return Measured(seconds * scale, stored.times(larger))


def _stored(learner: Learner) -> Stored:
    state = sum(array.nbytes for array in learner.state().values())
    with tempfile.TemporaryDirectory() as folder:
        learner.export(Path(folder))
        files = [path.stat().st_size for path in Path(folder).rglob("*") if path.is_file()]
    return Stored(state, sum(files))


def mean_seconds(step: Callable[[], object], after: Callable[[], object] = lambda: None) -> float:
    """Return the mean seconds of a step, without the first of several, which also prepares.

    Args:
        after: is called after each step, and not timed.
    """
    seconds = list[float]()
    while len(seconds) < _STEPS and sum(seconds) < _LONG_SECONDS:
        began = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - began)
        after()
    later = seconds[1:] or seconds
    return sum(later) / len(later)


def time_lines(hours: Span, source: str, usd_per_hour: float | None) -> Iterator[str]:
    """Yield what a plan says of time and cost for people.

    Args:
        source: what the hours come from, after a space; "" if that is said elsewhere.
        usd_per_hour: of all devices; None if it is not known.
    """
    yield f"time     {durations(hours.low * 3600, hours.high * 3600)}{source}, without validation"
    if usd_per_hour is not None:
        ends = dict.fromkeys(f"{end * usd_per_hour:.3g}" for end in (hours.low, hours.high))
        yield f"cost     {' to '.join(ends)} USD, at {usd_per_hour:.3g} an hour"
