"""Where a run's time went, computed from its ledger alone.

The wall clock, from the start of the first attempt to the end of the last one, is split into
consecutive spans without gaps. Their durations add up to the wall clock:

- useful: work that led to the run's current state
- lost: work that had to be repeated, or whose result is lost; this includes the time to notice a
  failure and to stop the ranks
- restarting: from the start of the ranks to their first step, including the first time
- checkpointing: training was blocked by a checkpoint
- waiting: no ranks, between attempts and between supervisors, and until an attempt's pods have
  their nodes and images

If the clock was set forward during an attempt, or its machine slept, nobody spent that time. It is
left out where the attempt says nothing for longest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Literal

from steadytrain.components.shared.events import Event
from steadytrain.components.shared.events.types import (
    AttemptStarted,
    CheckpointSaved,
    PodWaited,
)
from steadytrain.components.train.recovery.history import AttemptHistory, History, State, is_of_rank
from steadytrain.components.train.recovery.outcome import SUCCESSES

Kind = Literal["useful", "lost", "restarting", "checkpointing", "waiting"]


@dataclass(frozen=True)
class Span:
    """A part of the wall clock, in seconds since the epoch.

    attempt: the attempt it belongs to; for a wait, the attempt that follows.
    skipped: how many of these seconds the clock only jumped over.
    """

    kind: Kind
    attempt: int
    start: float
    end: float
    skipped: float = 0.0

    @property
    def seconds(self) -> float:
        return self.end - self.start - self.skipped


@dataclass(frozen=True)
class Times:
    """A run's seconds by kind."""

    useful: float = 0.0
    lost: float = 0.0
    restarting: float = 0.0
    checkpointing: float = 0.0
    waiting: float = 0.0

    @classmethod
    def of(cls, cut: Iterable[Span]) -> Times:
        """Return the sums over spans."""
        sums = dict.fromkeys((item.name for item in fields(cls)), 0.0)
        for span in cut:
            sums[span.kind] += span.seconds
        return cls(**sums)

    @property
    def wall(self) -> float:
        return self.useful + self.lost + self.restarting + self.checkpointing + self.waiting

    @property
    def goodput(self) -> float:
        """The useful share of the wall clock; 0 if no time has passed."""
        return self.useful / self.wall if self.wall else 0.0

    def cost(self, price_per_hour: float) -> float:
        """Return the cost of the machines. A waiting run holds none."""
        return price_per_hour * (self.wall - self.waiting) / 3600


def spans(history: History, *, until: float = 0.0) -> list[Span]:
    """Return the spans of the wall clock, in order.

    Args:
        until: for an attempt without an end, the last moment at which it is known to have run.
    """
    result: list[Span] = []
    clock = history.attempts[0].started.time if history.attempts else 0.0
    for index, attempt in enumerate(history.attempts):
        surviving = _surviving(attempt, history.attempts[index + 1 :])
        jumped = _jumps(attempt)
        for kind, end in _moved(attempt, _pieces(attempt, surviving, until)):
            # Machine clocks differ, but spans must not run backwards.
            if end > clock:
                result.append(Span(kind, attempt.started.attempt, clock, end, jumped(clock, end)))
                clock = end
    return result


def unrecorded(attempt: AttemptHistory, events: Iterable[Event]) -> list[State]:
    """Return what an attempt's ranks reported but its supervisor died before recording."""
    known = [attempt.ready, *attempt.checkpoints, *attempt.repeats]
    return [
        event
        for event in events
        if is_of_rank(event) and event.attempt == attempt.started.attempt and event not in known
    ]


def pods_waited(attempt: AttemptStarted, events: Iterable[Event], end: float) -> float:
    """Return how many seconds an attempt waited until all of its pods had started.

    Args:
        end: when the attempt ended. If a pod never started, all of the attempt was a wait.
    """
    waits = [
        event.started or end
        for event in events
        if isinstance(event, PodWaited) and event.attempt == attempt.attempt
    ]
    # The cluster's times are its own clock's, in full seconds.
    return min(max(0.0, max(waits, default=0.0) - attempt.time), max(0.0, end - attempt.time))


def last_sign_of_life(attempt: AttemptHistory, events: Iterable[Event]) -> tuple[float, int]:
    """Return the time and step of an attempt's last known event."""
    time, step = attempt.started.time, attempt.last_step
    for event in events:
        if getattr(event, "attempt", None) == attempt.started.attempt:
            time = max(time, event.time)
            step = max(step, getattr(event, "step", 0))
    return time, step


def _jumps(attempt: AttemptHistory) -> Callable[[float, float], float]:
    """Return a function that says how many seconds between two times the clock jumped over."""
    skipped, shares = attempt.skipped, dict[tuple[float, float], float]()
    if skipped and attempt.ended:
        start, end = attempt.started.time, attempt.ended.time
        times = {item.time for item in (attempt.ready, *attempt.checkpoints) if item}
        moments = [start, *sorted(time for time in times if start < time < end), end]
        for gap in sorted(pairwise(moments), key=lambda gap: gap[0] - gap[1]):
            length = gap[1] - gap[0]
            shares[gap] = min(skipped, length) / length
            skipped -= shares[gap] * length
    return lambda start, end: sum(
        share * max(0.0, min(end, last) - max(start, first))
        for (first, last), share in shares.items()
    )


def _surviving(attempt: AttemptHistory, later: Sequence[AttemptHistory]) -> float:
    """Return the last step of an attempt that did not have to be repeated."""
    if later:
        return min(item.started.resumed_from_step or 0 for item in later)
    if attempt.ended is None or attempt.ended.outcome in SUCCESSES:
        return math.inf
    return attempt.last_step


def _pieces(
    attempt: AttemptHistory, surviving: float, until: float
) -> Iterator[tuple[Kind, float]]:
    """Yield each kind with the moment at which it ends."""
    began = attempt.started.time
    # A float, because a wait can split a step.
    step: float = attempt.started.resumed_from_step or 0
    saves = attempt.checkpoints
    end = attempt.ended.time if attempt.ended else max(until, began, *(item.time for item in saves))
    yield "waiting", min(end, began + attempt.waited)
    clock = attempt.ready.time if attempt.ready else _stopped(saves[0]) if saves else end
    yield "restarting", clock
    last = attempt.ended.step if attempt.ended else max([step, *(item.step for item in saves)])
    following = [*((_stopped(item), item.step) for item in saves[1:]), (end, last)]
    for saved, (stops, upto) in zip(saves, following, strict=False):
        yield from _work(clock, _stopped(saved), step, saved.step, surviving)
        clock, step = _stopped(saved) + saved.seconds - saved.waited_seconds, saved.step
        yield "checkpointing", clock
        if saved.waited_seconds:
            # Waits for the commit, as the next save does. Some of that save's steps came before.
            waits = saved.time - saved.waited_seconds
            before, after = max(0.0, waits - clock), max(0.0, stops - saved.time)
            share = before / (before + after) if before + after else 1.0
            middle = step + (upto - step) * share
            yield from _work(clock, waits, step, middle, surviving)
            clock, step = saved.time, middle
            yield "checkpointing", clock
    yield from _work(clock, end, step, last, surviving)


def _stopped(saved: CheckpointSaved) -> float:
    """Return when training stopped for the snapshot. The event's own time is that of the commit."""
    return saved.time - saved.writing_seconds - saved.seconds + saved.waited_seconds


def _moved(
    attempt: AttemptHistory, pieces: Iterable[tuple[Kind, float]]
) -> Iterator[tuple[Kind, float]]:
    """Yield the same pieces, but count everything after a rank hung as lost.

    This includes later checkpoints: a hung rank keeps running for a moment to report its stacks.
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
    """Split work after step `first` up to step `last` into a useful part and a lost part."""
    if last > first:
        share = min(1.0, max(0.0, (surviving - first) / (last - first)))
    else:
        share = float(surviving > last)
    yield "useful", start + share * (end - start)
    yield "lost", end
