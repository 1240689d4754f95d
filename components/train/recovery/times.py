"""Where a run's time went, from its ledger alone.

The wall clock, from the first attempt's start to the last one's end, is cut into
spans that follow each other without a gap, so that their times add up to it:

- useful: work that led to what the run has now
- lost: work that had to be done again, or of which nothing is left; the time to
  notice a failure and to take the ranks down is part of it
- restarting: from the start of the ranks to their first step, the first time too
- checkpointing: training stood still for a checkpoint
- waiting: no ranks: between an attempt and the next, and between supervisors
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Literal

from steadytrain.components.shared.events import Event
from steadytrain.components.shared.events.types import CheckpointSaved, TrainingStarted
from steadytrain.components.train.recovery.history import AttemptHistory, History
from steadytrain.components.train.recovery.outcome import SUCCESSES

Kind = Literal["useful", "lost", "restarting", "checkpointing", "waiting"]


@dataclass(frozen=True)
class Span:
    """A piece of the wall clock, in seconds since the epoch.

    attempt: whose it is; of a wait, the one that follows.
    """

    kind: Kind
    attempt: int
    start: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(frozen=True)
class Times:
    """Seconds of a run by what they went into."""

    useful: float = 0.0
    lost: float = 0.0
    restarting: float = 0.0
    checkpointing: float = 0.0
    waiting: float = 0.0

    @classmethod
    def of(cls, cut: Iterable[Span]) -> Times:
        """The sums over spans."""
        sums = dict.fromkeys((item.name for item in fields(cls)), 0.0)
        for span in cut:
            sums[span.kind] += span.seconds
        return cls(**sums)

    @property
    def wall(self) -> float:
        return self.useful + self.lost + self.restarting + self.checkpointing + self.waiting

    @property
    def goodput(self) -> float:
        """Useful share of the wall clock; 0 where no time has passed."""
        return self.useful / self.wall if self.wall else 0.0

    def cost(self, price_per_hour: float) -> float:
        """What the machines cost; while a run waits it holds none."""
        return price_per_hour * (self.wall - self.waiting) / 3600


def spans(history: History, *, until: float = 0.0) -> list[Span]:
    """The wall clock in pieces, in their order.

    Args:
        until: for an attempt that has no end yet: the last moment at which it is known to work.
    """
    found: list[Span] = []
    clock = history.attempts[0].started.time if history.attempts else 0.0
    for index, attempt in enumerate(history.attempts):
        surviving = _surviving(attempt, history.attempts[index + 1 :])
        for kind, end in _moved(attempt, _pieces(attempt, surviving, until)):
            # Clocks of machines differ; time does not run backwards all the same.
            if end > clock:
                found.append(Span(kind, attempt.started.attempt, clock, end))
                clock = end
    return found


def unrecorded(attempt: AttemptHistory, events: Iterable[Event]) -> list[Event]:
    """What an attempt's ranks told that its supervisor died before it could record."""
    known = {(item.name, item.step) for item in (*attempt.checkpoints, attempt.ready) if item}
    return [
        event
        for event in events
        if isinstance(event, CheckpointSaved | TrainingStarted)
        and event.attempt == attempt.started.attempt
        and (event.name, event.step) not in known
    ]


def last_sign_of_life(attempt: AttemptHistory, events: Iterable[Event]) -> tuple[float, int]:
    """Time and step of the last that is known of an attempt."""
    time, step = attempt.started.time, attempt.last_step
    for event in events:
        if getattr(event, "attempt", None) == attempt.started.attempt:
            time = max(time, event.time)
            step = max(step, getattr(event, "step", 0))
    return time, step


def _surviving(attempt: AttemptHistory, later: Sequence[AttemptHistory]) -> float:
    """The last step of an attempt that nobody had to take again."""
    if later:
        return min(item.started.resumed_from_step or 0 for item in later)
    if attempt.ended is None or attempt.ended.outcome in SUCCESSES:
        return math.inf
    return attempt.last_step


def _pieces(
    attempt: AttemptHistory, surviving: float, until: float
) -> Iterator[tuple[Kind, float]]:
    """Kinds with the moments at which they end."""
    began = attempt.started.time
    # Of steps a part, where a wait divides them.
    step: float = attempt.started.resumed_from_step or 0
    yield "waiting", began
    saves = attempt.checkpoints
    end = attempt.ended.time if attempt.ended else max(until, began, *(item.time for item in saves))
    clock = attempt.ready.time if attempt.ready else _stopped(saves[0]) if saves else end
    yield "restarting", clock
    last = attempt.ended.step if attempt.ended else max([step, *(item.step for item in saves)])
    following = [*((_stopped(item), item.step) for item in saves[1:]), (end, last)]
    for saved, (stops, upto) in zip(saves, following, strict=False):
        yield from _work(clock, _stopped(saved), step, saved.step, surviving)
        clock, step = _stopped(saved) + saved.seconds - saved.waited_seconds, saved.step
        yield "checkpointing", clock
        if saved.waited_seconds:
            # For the commit, as the next save does; of the steps up to that one some came before.
            waits = saved.time - saved.waited_seconds
            before, after = max(0.0, waits - clock), max(0.0, stops - saved.time)
            share = before / (before + after) if before + after else 1.0
            middle = step + (upto - step) * share
            yield from _work(clock, waits, step, middle, surviving)
            clock, step = saved.time, middle
            yield "checkpointing", clock
    yield from _work(clock, end, step, last, surviving)


def _stopped(saved: CheckpointSaved) -> float:
    """When training stood still for the snapshot, before the writing; it is told at the commit."""
    return saved.time - saved.writing_seconds - saved.seconds + saved.waited_seconds


def _moved(
    attempt: AttemptHistory, pieces: Iterable[tuple[Kind, float]]
) -> Iterator[tuple[Kind, float]]:
    """The same pieces, but what comes after a rank stood still is lost.

    Even what was saved then: a stopped rank goes on for a moment to tell its stacks.
    """
    still = attempt.ended.still_since if attempt.ended else 0.0
    for kind, end in pieces:
        if still and end > still:
            yield kind, still
            yield "lost", end
        else:
            yield kind, end


def _work(
    start: float, end: float, first: float, last: float, surviving: float
) -> Iterator[tuple[Kind, float]]:
    """Work after step `first` up to step `last`, as far as it survives; the rest is lost."""
    if last > first:
        share = min(1.0, max(0.0, (surviving - first) / (last - first)))
    else:
        share = float(surviving > last)
    yield "useful", start + share * (end - start)
    yield "lost", end
